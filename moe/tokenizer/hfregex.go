package tokenizer

import (
	"fmt"
	"strings"
	"time"

	"github.com/dlclark/regexp2/v2"
)

// Bounds of an expression of a tokenizer.json, and of the time it may take: real
// ones have up to 2 KB and do 5 MB/s. One that backtracks without end gives an
// error.
const (
	maxExpr       = 1 << 16
	matchTime     = 5 * time.Second       // one match
	findTime      = 10 * time.Second      // all of a text's, and beyond that
	findTimeARune = 10 * time.Microsecond // for each character
)

// newRegexFinder compiles an expression, which is written for Oniguruma.
func newRegexFinder(expr string) (finder, error) { return newRegexFinderWithin(expr, matchTime) }

func newRegexFinderWithin(expr string, match time.Duration) (finder, error) {
	ours, err := fromOniguruma(expr)
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", expr, err)
	}
	re, err := regexp2.Compile(ours, regexp2.Multiline) // in Ruby's syntax ^ and $ are about lines
	if err != nil {
		return nil, fmt.Errorf("expression %q: %w", expr, err)
	}
	re.MatchTimeout = match
	return func(text []rune, found func(from, to int) error) error {
		begin, limit, matches := time.Now(), findTime+time.Duration(len(text))*findTimeARune, 0
		var stop error
		err := re.FindRunesMatches(text, 0, func(m regexp2.MatchView) bool {
			from, n, _ := m.GroupRange(0)
			if matches++; matches%1024 == 0 && time.Since(begin) > limit {
				stop = fmt.Errorf("the expression %q takes too long", expr)
				return false
			}
			stop = found(from, from+n)
			return stop == nil
		})
		if err != nil { // the time limit, or the stack of backtracking is full
			return fmt.Errorf("the expression %q takes too long", expr)
		}
		return stop
	}, nil
}

// fromOniguruma rewrites an expression in the syntax of Oniguruma (Ruby's) into
// that of regexp2 (.NET's) where the two differ: possessive quantifiers, {,n},
// stacked quantifiers, \p{^L} and the intersection of a class with a negated
// one. What would mean something else in silence is an error.
func fromOniguruma(expr string) (string, error) {
	if len(expr) > maxExpr {
		return "", fmt.Errorf("has %d bytes, at most %d are read", len(expr), maxExpr)
	}
	var out strings.Builder
	var groups []int // where each open group begins in out
	atom := -1       // where the last atom begins in out, -1 if there is none
	for i := 0; i < len(expr); {
		switch c := expr[i]; c {
		case '\\':
			n, text, err := escape(expr[i:])
			if err != nil {
				return "", err
			}
			atom = out.Len()
			out.WriteString(text)
			i += n
		case '[':
			n, text, err := class(expr[i:])
			if err != nil {
				return "", err
			}
			atom = out.Len()
			out.WriteString(text)
			i += n
		case '(':
			groups = append(groups, out.Len())
			end := i + 1
			if strings.HasPrefix(expr[i:], "(?") { // what kind of group it is
				for end++; end < len(expr) && (expr[end] == '-' || expr[end] >= 'a' && expr[end] <= 'z'); end++ {
				}
				if flags := expr[i+2 : end]; strings.Trim(flags, "ix-") != "" {
					return "", fmt.Errorf("the option %q is not supported: supported are i and x", flags)
				}
				if end == len(expr) || strings.IndexByte(":=!><)", expr[end]) < 0 {
					return "", fmt.Errorf("the group at byte %d is of no supported kind", i)
				}
				if expr[end] != ')' {
					end++
				}
			}
			out.WriteString(expr[i:end])
			atom = -1
			i = end
		case ')':
			if len(groups) == 0 {
				return "", fmt.Errorf("the ) at byte %d closes nothing", i)
			}
			atom = groups[len(groups)-1]
			groups = groups[:len(groups)-1]
			out.WriteByte(c)
			i++
		case '*', '+', '?', '{':
			n, quantifier := repeat(expr[i:])
			if n == 0 { // a brace that is no quantifier
				atom = out.Len()
				out.WriteString(`\{`)
				i++
				continue
			}
			if atom < 0 {
				return "", fmt.Errorf("the %c at byte %d repeats nothing", c, i)
			}
			out.WriteString(quantifier)
			i += n
			switch {
			case i == len(expr):
			case expr[i] == '?': // as few as possible
				out.WriteByte('?')
				i++
			case expr[i] == '+' && c != '{': // and none given back
				what := out.String()
				out.Reset()
				out.WriteString(what[:atom] + "(?>" + what[atom:] + ")")
				i++
			}
			// A further quantifier repeats all of it.
			if i < len(expr) && strings.IndexByte("*+?{", expr[i]) >= 0 {
				if n, _ := repeat(expr[i:]); n > 0 {
					what := out.String()
					out.Reset()
					out.WriteString(what[:atom] + "(?:" + what[atom:] + ")")
					if out.Len() > 2*maxExpr {
						return "", fmt.Errorf("too many quantifiers on one another")
					}
				}
			}
		case '|':
			out.WriteByte(c)
			atom = -1
			i++
		default:
			atom = out.Len()
			out.WriteByte(c)
			for i++; i < len(expr) && expr[i]&0xC0 == 0x80; i++ { // all of a character
				out.WriteByte(expr[i])
			}
		}
	}
	return out.String(), nil
}

// repeat is the quantifier that s begins with and its length, 0 if a brace there
// is none.
func repeat(s string) (n int, quantifier string) {
	if s[0] != '{' {
		return 1, s[:1]
	}
	end := strings.IndexByte(s, '}')
	if end < 2 {
		return 0, ""
	}
	from, to, comma := strings.Cut(s[1:end], ",")
	if strings.Trim(from+to, "0123456789") != "" || from+to == "" {
		return 0, ""
	}
	if from == "" && comma {
		from = "0"
	}
	if comma {
		from += ","
	}
	return end + 1, "{" + from + to + "}"
}

// escape is the escape that s begins with, and its length in s.
func escape(s string) (n int, text string, err error) {
	if len(s) < 2 {
		return 0, "", fmt.Errorf("ends in the middle of an escape")
	}
	switch s[1] {
	case 'p', 'P':
		end := strings.IndexByte(s, '}')
		if len(s) < 3 || s[2] != '{' || end < 0 {
			return 0, "", fmt.Errorf(`\%c without a name in braces`, s[1])
		}
		name, negated := strings.CutPrefix(s[3:end], "^")
		kind := s[1]
		if negated {
			kind ^= 'p' ^ 'P'
		}
		return end + 1, `\` + string(kind) + "{" + name + "}", nil
	case 'h', 'H', 'R', 'X', 'K', 'O', 'N', 'y', 'Y', 'G':
		return 0, "", fmt.Errorf(`the escape \%c is not supported`, s[1])
	}
	n = 2
	for n < len(s) && s[n]&0xC0 == 0x80 { // all of a character
		n++
	}
	return n, s[:n], nil
}

// class is the class in brackets that s begins with, and its length in s.
func class(s string) (n int, text string, err error) {
	var out strings.Builder
	out.WriteByte('[')
	i := 1
	if i < len(s) && s[i] == '^' {
		out.WriteByte('^')
		i++
	}
	if i < len(s) && s[i] == ']' {
		return 0, "", fmt.Errorf("an empty class")
	}
	for i < len(s) {
		switch c := s[i]; {
		case c == ']':
			out.WriteByte(c)
			return i + 1, out.String(), nil
		case c == '\\':
			n, text, err := escape(s[i:])
			if err != nil {
				return 0, "", err
			}
			out.WriteString(text)
			i += n
		case strings.HasPrefix(s[i:], "&&[^") && s[1] != '^':
			n, text, err := class("[" + s[i+len("&&[^"):])
			if err != nil {
				return 0, "", err
			}
			i += len("&&[^") + n - 1
			if i == len(s) || s[i] != ']' {
				return 0, "", fmt.Errorf("a class with more than one intersection, or more after it, is not supported")
			}
			out.WriteString("-" + text) // without these, in .NET's words
		case c == '[' || strings.HasPrefix(s[i:], "&&"):
			return 0, "", fmt.Errorf("a class with another class or an intersection in it is not supported")
		default:
			out.WriteByte(c)
			i++
		}
	}
	return 0, "", fmt.Errorf("a class is not closed with ]")
}
