// Command sluice runs Mixture-of-Experts language models that are larger than
// memory.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"sluice/cmd/bench"
	"sluice/cmd/engine"
	"sluice/moe"
	"sluice/storage"
	"sluice/tiers"
)

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// Exit codes.
const (
	exitDone        = 0
	exitError       = 1
	exitUsage       = 2
	exitRefused     = 3   // a safety check said no
	exitArms        = 4   // what was to be compared cannot be
	exitInterrupted = 130 // Ctrl-C; the summary was printed
)

// streams are what a command reads and writes.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// notice tells the user something beside the results. Names of files and texts of
// models in it cannot command the terminal.
func (s streams) notice(format string, args ...any) {
	lines := strings.Split(fmt.Sprintf(format, args...), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	io.WriteString(s.err, strings.Join(lines, "\n")+"\n")
}

// A command is one sub-command. run parses args, its own flags included.
type command struct {
	name, usage, about string
	run                func(ctx context.Context, s streams, args []string) error
}

func commands() []command {
	return []command{
		{"run", "[MODEL] [CAP] -p TEXT", "continue a text, experts streaming under the cap", runCommand},
		{"perplexity", "[MODEL] FILE", "measure how well a model predicts a text", perplexityCommand},
		{"logits", "[MODEL] --ids FILE -o OUT.safetensors", "write the logits and last hidden states of given tokens", logitsCommand},
		{"tokenize", "[MODEL]", "turn text on standard input into token ids, one a line", tokenizeCommand},
		{"plan", "[MODEL]", "show what would lie where in memory, and how fast the drive allows", planCommand},
		{"inspect", "[MODEL]", "describe a model from its headers", inspectCommand},
		{"pack", "[MODEL] [-o OUT.slab]", "pack a model so that one read brings an expert", packCommand},
		{"verify", "[MODEL]", "read a model whole and name every expert or tensor that is bad", verifyCommand},
		{"replay", "TRACE.csv", "say what each policy would have kept, from a trace and without its model", replayCommand},
		{"synth", "-o FILE --size 8GiB", "write a valid random model of a given size", synthCommand},
		{"doctor", "[MODEL]", "look for what makes this machine slow, with the words that mend it", doctorCommand},
		{"bench", "storage|experts|cap|draft|limit [MODEL]", "measure a drive, experts on a GPU, caps, drafts, or a model under a memory limit", benchCommand},
	}
}

// run is the program: arguments in, an exit code out.
func run(args []string, in io.Reader, out, errw io.Writer) int {
	s := streams{in, out, errw}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	signal.Ignore(syscall.SIGPIPE) // a closed output is an error of the write, which cleans up
	defer stop()
	go func() { // a second Ctrl-C ends the program at once
		<-ctx.Done()
		stop()
	}()
	if len(args) == 0 {
		help(errw)
		return exitUsage
	}
	if args[0] == "-h" || args[0] == "--help" || args[0] == "help" {
		help(out)
		return exitDone
	}
	if args[0] == renderName {
		return renderCommand(s)
	}
	for _, c := range commands() {
		if c.name == args[0] {
			return code(s, c, c.run(ctx, s, args[1:]))
		}
	}
	s.notice("sluice: unknown command %q; sluice help lists the commands", args[0])
	return exitUsage
}

func help(w io.Writer) {
	fmt.Fprint(w, "sluice runs Mixture-of-Experts language models that are larger than memory.\n\n")
	for _, c := range commands() {
		fmt.Fprintf(w, "  sluice %-11s%-40s%s\n", c.name, c.usage, c.about)
	}
	fmt.Fprint(w, "\nMODEL is a GGUF file, a Hugging Face directory, a colibri container or a slab; with none, the demo model.\nsluice COMMAND --help lists the flags of a command.\n")
}

// errInterrupted says that Ctrl-C ended a command after its summary.
var errInterrupted = errors.New("interrupted")

// A usageError is a mistake in the arguments.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

// A refusedError says that this machine lacks what was asked for.
type refusedError struct{ error }

func (e *refusedError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// code prints a command's error and gives its exit code.
func code(s streams, c command, err error) int {
	var usage *usageError
	var context_ *moe.ContextError
	var room *tiers.NoRoomError
	var refused *engine.RefusedError
	var lacks *refusedError
	var arms *bench.RefusedError
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, pflag.ErrHelp):
		return exitDone
	case errors.Is(err, errInterrupted), errors.Is(err, context.Canceled):
		s.notice("sluice %s: interrupted", c.name)
		return exitInterrupted
	case errors.As(err, &usage):
		s.notice("sluice %s: %v\nusage: sluice %s %s (--help lists the flags)", c.name, err, c.name, c.usage)
		return exitUsage
	case errors.As(err, &context_):
		s.notice("sluice %s: %v", c.name, err)
		return exitUsage
	case errors.As(err, &arms):
		s.notice("%v", err)
		return exitArms
	case errors.As(err, &room), errors.As(err, &refused), errors.As(err, &lacks):
		s.notice("sluice %s: %v", c.name, err)
		return exitRefused
	}
	s.notice("sluice %s: %v", c.name, err)
	if errors.Is(err, storage.ErrNoModel) {
		text := ""
		if c.name == "run" {
			text = "; text goes behind -p, or to standard input"
		}
		s.notice("the first argument is MODEL, a path%s (sluice %s --help)", text, c.name)
	}
	return exitError
}
