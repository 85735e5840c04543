module sluice

go 1.26.0

require (
	github.com/ardanlabs/jinja v1.8.0
	github.com/dlclark/regexp2/v2 v2.13.0
	github.com/hashicorp/golang-lru/v2 v2.0.7
	github.com/pawelgaczynski/giouring v0.0.0-20230826085535-69588b89acb9
	github.com/spf13/pflag v1.1.0
	golang.org/x/sys v0.50.0
)

require golang.org/x/text v0.44.0

require github.com/ebitengine/purego v0.11.3
