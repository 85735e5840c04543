package engine

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Where the effective value of a setting came from.
const (
	FromFlag        = "flag"        // --name VALUE
	FromArgument    = "argument"    // a positional argument
	FromEnvironment = "environment" // a variable SLUICE_...
	FromFile        = "file"        // the model's metadata
	FromDefault     = "default"     // nobody said otherwise
	FromAuto        = "auto"        // fitted to this machine
)

// A Setting is one value that a run depends on, as it took effect. Requested
// is what was asked for, where that could not be honoured.
type Setting struct {
	Name      string `json:"-"`
	Value     any    `json:"value"`
	Origin    string `json:"origin"`
	Requested any    `json:"requested,omitempty"`
}

// Settings are in the order in which they are printed.
type Settings []Setting

// Set adds a setting or replaces the one of its name.
func (s *Settings) Set(v Setting) {
	for i := range *s {
		if (*s)[i].Name == v.Name {
			(*s)[i] = v
			return
		}
	}
	*s = append(*s, v)
}

// Map is the settings by name, for JSON.
func (s Settings) Map() map[string]Setting {
	m := make(map[string]Setting, len(s))
	for _, v := range s {
		m[v.Name] = v
	}
	return m
}

// Print writes one line for each setting: name, value, origin.
func (s Settings) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, v := range s {
		fmt.Fprintf(t, "%s\t%v\t%s", v.Name, v.Value, v.Origin)
		if v.Requested != nil {
			fmt.Fprintf(t, "\t(requested %v)", v.Requested)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}
