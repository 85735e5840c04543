package chat

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// plainSource rewrites a template into one that means the same and leaves the
// library nothing to get wrong: Jinja's rules for white space (trim_blocks and
// lstrip_blocks on, one line feed at the end dropped, as Hugging Face sets
// them) are applied here, so text comes out as quoted expressions, raw blocks
// and comments are gone, closing braces of nested dicts are kept apart, and
// escapes in texts are decoded. Lines keep their numbers.
func plainSource(template string) (string, error) {
	src := strings.ReplaceAll(strings.ReplaceAll(template, "\r\n", "\n"), "\r", "\n")
	r := rewriter{src: strings.TrimSuffix(src, "\n"), lineStart: true}
	for r.pos < len(r.src) {
		if err := r.step(); err != nil {
			return "", fmt.Errorf("line %d: %w", 1+strings.Count(r.src[:r.pos], "\n"), err)
		}
	}
	scopes(r.parts)
	return strings.Join(r.parts, ""), nil
}

type rewriter struct {
	src       string
	pos       int
	lineStart bool     // the tag before pos took the end of its line with it, or there is none
	parts     []string // the new template: tags, each on its own, and comments
}

func (r *rewriter) write(part string) { r.parts = append(r.parts, part) }

// step rewrites the text up to the next tag, and the tag.
func (r *rewriter) step() error {
	at := r.pos
	for at < len(r.src) && !(r.src[at] == '{' && at+1 < len(r.src) && strings.IndexByte("{%#", r.src[at+1]) >= 0) {
		at++
	}
	text := r.src[r.pos:at]
	if at == len(r.src) {
		r.text(text, text)
		r.pos = at
		return nil
	}
	kind := r.src[at+1]
	body := at + 2
	sign := byte(0)
	if body < len(r.src) && (r.src[body] == '-' || r.src[body] == '+') {
		sign = r.src[body]
		body++
	}
	r.text(text, r.beforeTag(text, kind, sign))
	r.pos = at
	if kind == '#' {
		end := strings.Index(r.src[body:], "#}")
		if end < 0 {
			return fmt.Errorf("the comment that begins here is not closed with #}")
		}
		end += body
		r.lines(r.src[at:end])
		last := byte(0)
		if end > body { // {#-#} has one sign, on its left
			last = r.src[end-1]
		}
		r.afterTag(end+2, '#', last)
		return nil
	}
	if kind == '%' {
		if m := rawBegin.FindString(r.src[body:]); m != "" {
			return r.raw(at, body+len(m), m)
		}
	}
	return r.tag(at, body, kind)
}

var (
	rawBegin = regexp.MustCompile(`^\s*raw\s*-?%\}`)
	rawEnd   = regexp.MustCompile(`\{%([-+]?)\s*endraw\s*([-+]?)%\}`)
)

// raw rewrites the text of a raw block, whose begin tag ends at pos.
func (r *rewriter) raw(at, pos int, begin string) error {
	end := rawEnd.FindStringSubmatchIndex(r.src[pos:])
	if end == nil {
		return fmt.Errorf("the raw block that begins here is not closed with {%% endraw %%}")
	}
	r.lines(r.src[at:pos])
	r.lineStart = false
	text := r.src[pos : pos+end[0]]
	kept := text
	if strings.HasSuffix(begin, "-%}") {
		kept = strings.TrimLeft(kept, whiteSpace)
		r.lines(text[:len(text)-len(kept)])
		text = kept
	}
	r.text(text, r.beforeTag(text, '%', signAt(r.src[pos:], end[2], end[3])))
	r.lines(r.src[pos+end[0] : pos+end[1]])
	r.afterTag(pos+end[1], '%', signAt(r.src[pos:], end[4], end[5]))
	return nil
}

func signAt(s string, from, to int) byte {
	if from < to {
		return s[from]
	}
	return 0
}

// whiteSpace is what Python takes for white space.
const whiteSpace = " \t\n\v\f\r\x1c\x1d\x1e\x1f\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"

// beforeTag is what remains of the text before a tag.
func (r *rewriter) beforeTag(text string, kind, sign byte) string {
	if sign == '-' {
		return strings.TrimRight(text, whiteSpace)
	}
	if kind == '{' || sign == '+' {
		return text
	}
	line := strings.LastIndexByte(text, '\n') + 1
	if (line > 0 || r.lineStart) && strings.Trim(text[line:], whiteSpace) == "" {
		return text[:line]
	}
	return text
}

// afterTag skips what a tag takes of the text after it, which begins at end.
func (r *rewriter) afterTag(end int, kind, sign byte) {
	r.pos = end
	switch {
	case sign == '-':
		rest := strings.TrimLeft(r.src[end:], whiteSpace)
		r.pos = len(r.src) - len(rest)
	case kind != '{' && sign != '+' && strings.HasPrefix(r.src[end:], "\n"):
		r.pos++
	}
	r.lines(r.src[end:r.pos])
	r.lineStart = r.pos > 0 && r.pos > end && r.src[r.pos-1] == '\n'
}

// text writes kept, a beginning of text, as an expression.
func (r *rewriter) text(text, kept string) {
	if kept != "" {
		r.write(`{{"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(kept) + `"}}`)
	}
	r.lines(text[len(kept):])
}

// lines keeps the count of lines right where s was left out.
func (r *rewriter) lines(s string) {
	if n := strings.Count(s, "\n"); n > 0 {
		r.write("{#" + strings.Repeat("\n", n) + "#}")
	}
}

// tag rewrites an expression or statement that begins at at, its content at pos.
func (r *rewriter) tag(at, pos int, kind byte) error {
	open, end, what := "{{ ", "}}", "expression"
	if kind == '%' {
		open, end, what = "{% ", "%}", "statement"
	}
	var out strings.Builder
	var nest []byte           // closing brackets that are due
	var calls []methodCall    // of methods that the library has only in part, while their arguments last
	operand := make([]int, 1) // where the last operand begins in out, with what is called on it, at each depth of brackets
	last := byte(0)           // the last character that is not white space
	word := ""                // the last identifier
	for pos < len(r.src) {
		c := r.src[pos]
		if len(nest) == 0 {
			sign, closed := byte(0), pos
			if c == '-' || kind == '%' && c == '+' {
				sign, closed = c, pos+1
			}
			if strings.HasPrefix(r.src[closed:], end) {
				bodies, err := checkTag(out.String(), kind, len(r.parts))
				if err != nil {
					return err
				}
				for _, body := range bodies {
					r.write(open + strings.TrimLeft(body, " ") + " " + end)
				}
				r.afterTag(closed+2, kind, sign)
				return nil
			}
		}
		switch {
		case c == '\'' || c == '"':
			operand[len(nest)] = out.Len()
			n, err := literal(&out, r.src[pos:])
			if err != nil {
				return err
			}
			pos += n
			last = c
			continue
		case isWord(c):
			from := pos
			for pos < len(r.src) && isWord(r.src[pos]) {
				pos++
			}
			word = r.src[from:pos]
			if last != '.' {
				operand[len(nest)] = out.Len()
			}
			if last == '|' && word == "tojson" {
				word = ownJSON
			}
			out.WriteString(word)
			last = 'a'
			continue
		case c == '(' || c == '[' || c == '{':
			if len(nest) == maxDepth {
				return fmt.Errorf("brackets nested deeper than %d", maxDepth)
			}
			if n := len(calls) - 1; n >= 0 && c == '(' && strings.HasSuffix(calls[n].word, "with") && out.Len() == calls[n].args {
				calls[n].rewrite(&out) // several texts in brackets
				calls = calls[:n]
			}
			if c == '(' && last == 'a' && methods[word] && strings.HasSuffix(out.String(), "."+word) {
				calls = append(calls, methodCall{len(nest) + 1, operand[len(nest)], out.Len() - len(word) - 1, out.Len() + 1, word})
			}
			if after := last == 'a' && !operators[word] || strings.IndexByte("'\")]}", last) >= 0 && last != 0; c == '{' || !after {
				operand[len(nest)] = out.Len()
			}
			nest = append(nest, map[byte]byte{'(': ')', '[': ']', '{': '}'}[c])
			operand = append(operand[:len(nest)], out.Len()+1)
		case c == ')' || c == ']' || c == '}':
			if len(nest) == 0 || nest[len(nest)-1] != c {
				return fmt.Errorf("%q in this %s closes nothing", c, what)
			}
			if n := len(calls) - 1; n >= 0 && calls[n].depth == len(nest) {
				calls = calls[:n]
			}
			nest = nest[:len(nest)-1]
			if last == '}' {
				out.WriteByte(' ') // or the library would see the end of the tag
			}
		case c == '%' && (last == '\'' || last == '"'):
			return fmt.Errorf("formatting with the operator %% is not supported")
		case c == ',' && len(calls) > 0 && calls[len(calls)-1].depth == len(nest):
			n := len(calls) - 1
			calls[n].rewrite(&out) // a limit, which the library overlooks
			calls = calls[:n]
		case strings.IndexByte(" \t\n\v\f\r", c) >= 0:
			if c != '\n' {
				c = ' '
			}
			out.WriteByte(c)
			pos++
			continue
		case strings.IndexByte(",.:|~+-*/%<>=!", c) < 0:
			return fmt.Errorf("%q in this %s is not understood", rune(c), what)
		}
		out.WriteByte(c)
		last = c
		pos++
	}
	return fmt.Errorf("the %s that begins here is not closed with %s", what, end)
}

// A methodCall is a call of a method of texts: where in the tag the text, the point
// after it and the arguments begin, and how deep in brackets these are.
type methodCall struct {
	depth, on, dot, args int
	word                 string
}

// methods are those that the library has only in part: it overlooks the limit of
// a split, and several texts to begin or end with.
var methods = map[string]bool{"split": true, "rsplit": true, "startswith": true, "endswith": true}

// rewrite makes the call, of which some arguments are written, one of a function
// of ours.
func (m methodCall) rewrite(out *strings.Builder) {
	all := out.String()
	out.Reset()
	out.WriteString(all[:m.on] + "_" + m.word + "(" + all[m.on:m.dot] + ", " + all[m.args:])
}

// operators are the words after which a bracket begins an operand.
var operators = map[string]bool{"in": true, "not": true, "and": true, "or": true, "if": true, "elif": true, "else": true, "is": true}

func isWord(c byte) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// shapes are what the library understands of some statements. It takes others
// as well, and gets them wrong.
var shapes = []struct {
	word, says string
	is         *regexp.Regexp
}{
	{"set", "one name, or a namespace and a name", regexp.MustCompile(`^set\s+[A-Za-z_]\w*(\s*\.\s*[A-Za-z_]\w*)?\s*(=[^=]|$)`)},
	{"for", "one or two names without brackets", regexp.MustCompile(`^for\s+[A-Za-z_]\w*(\s*,\s*[A-Za-z_]\w*)?\s+in\b`)},
	{"filter", "the name of one filter without arguments", regexp.MustCompile(`^filter\s+[A-Za-z_]\w*$`)},
}

// checkTag gives the tag's content, which may need several tags: n makes a name
// that no other has.
func checkTag(body string, kind byte, n int) ([]string, error) {
	trimmed := strings.TrimSpace(body)
	if trimmed == "" {
		return nil, fmt.Errorf("an empty tag")
	}
	if m := unpacking.FindStringSubmatch(trimmed); kind == '%' && m != nil {
		value := m[2]
		if topLevelComma(value) {
			value = "[" + value + "]"
		}
		all := fmt.Sprintf("_unpack%d", n)
		bodies := []string{"set " + all + " = " + value}
		for i, name := range strings.Split(m[1], ",") {
			bodies = append(bodies, fmt.Sprintf("set %s = %s[%d]", strings.TrimSpace(name), all, i))
		}
		return bodies, nil
	}
	for _, s := range shapes {
		if kind == '%' && statement.FindString(trimmed) == s.word && !s.is.MatchString(trimmed) {
			return nil, fmt.Errorf("%s here takes %s: %q", s.word, s.says, trimmed)
		}
	}
	return []string{body}, nil
}

// unpacking is a set of several names.
var unpacking = regexp.MustCompile(`^set\s+([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)+)\s*=((?s:[^=].*))$`)

// topLevelComma says whether an expression is a list without brackets.
func topLevelComma(s string) bool {
	nest := 0
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\'' || c == '"':
			i = endOfLiteral(s, i)
		case strings.IndexByte("([{", c) >= 0:
			nest++
		case strings.IndexByte(")]}", c) >= 0:
			nest--
		case c == ',' && nest == 0:
			return true
		}
	}
	return false
}

// endOfLiteral is where the quoted text that begins at i ends.
func endOfLiteral(s string, i int) int {
	quote := s[i]
	for i++; i < len(s) && s[i] != quote; i++ {
		if s[i] == '\\' {
			i++
		}
	}
	return i
}

// literal rewrites the quoted text that s begins with, in escapes that the
// library knows, and returns its length in s.
func literal(out *strings.Builder, s string) (int, error) {
	quote := s[0]
	out.WriteByte(quote)
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == quote:
			out.WriteByte(quote)
			return i + 1, nil
		case s[i] != '\\' || i+1 == len(s):
			out.WriteByte(s[i])
			continue
		}
		i++
		digits, base := 0, 16
		switch c := s[i]; c {
		case 'n', 't', '\\', '\'', '"':
			out.WriteString(s[i-1 : i+1])
		case 'r':
			out.WriteByte('\r')
		case 'a':
			out.WriteByte('\a')
		case 'b':
			out.WriteByte('\b')
		case 'f':
			out.WriteByte('\f')
		case 'v':
			out.WriteByte('\v')
		case 'x':
			digits = 2
		case 'u':
			digits = 4
		case 'U':
			digits = 8
		case '0', '1', '2', '3', '4', '5', '6', '7':
			digits, base = 1, 8
			for digits < 3 && i+digits < len(s) && s[i+digits] >= '0' && s[i+digits] <= '7' {
				digits++
			}
			i--
		default:
			out.WriteString(`\\`) // Python keeps an unknown escape
			out.WriteByte(c)
		}
		if digits == 0 {
			continue
		}
		if i+1+digits > len(s) {
			return 0, fmt.Errorf("a text ends in the middle of an escape")
		}
		n, err := strconv.ParseUint(s[i+1:i+1+digits], base, 32)
		if err != nil {
			return 0, fmt.Errorf("the escape %q is not a number", s[i+1:i+1+digits])
		}
		if n == '\\' || n == uint64(quote) {
			out.WriteByte('\\')
		}
		out.WriteRune(rune(n))
		i += digits
	}
	return 0, fmt.Errorf("the text %s is not closed with %c", strconv.Quote(s[:min(len(s), 20)]), quote)
}

// scopes gives each turn of a loop its own names, as Jinja does: what a turn
// sets is unset in the next. The library keeps one scope for all turns, so the
// body of a loop that sets names goes into an inner loop of one turn. It also
// has macros say when they begin and end, so that Render can bound how deep
// they call each other.
func scopes(parts []string) {
	type block struct {
		begin string // for, if, macro, ...
		at    int    // the part that begins it
		sets  bool   // for: it sets names
		ends  []int  // for: the else and endfor
		leave []int  // for: the breaks
	}
	var open []*block
	loop := func() *block { // the loop of the current scope, or nil
		for i := len(open) - 1; i >= 0; i-- {
			switch open[i].begin {
			case "for":
				if len(open[i].ends) == 0 {
					return open[i]
				}
			case "macro", "call":
				return nil
			}
		}
		return nil
	}
	wrap := func(b *block) {
		n := strconv.Itoa(b.at)
		before, begin, end := "", "{% set _loop"+n+" = loop %}{% for _turn in [0] %}{% set loop = _loop"+n+" %}", "{% endfor %}"
		if b.leave != nil {
			before = "{% set _left" + n + " = namespace(yes=false) %}"
			begin = "{% if not _left" + n + ".yes %}" + begin
			end += "{% endif %}"
		}
		parts[b.at] = before + parts[b.at] + begin
		parts[b.ends[0]] = end + parts[b.ends[0]]
		for _, i := range b.leave {
			parts[i] = "{% set _left" + n + ".yes = true %}" + parts[i]
		}
	}
	for i, part := range parts {
		body, ok := strings.CutPrefix(part, "{% ")
		if !ok {
			continue
		}
		word := strings.TrimSpace(statement.FindString(body))
		switch word {
		case "macro":
			parts[i] += "{{ _enter() }}"
			open = append(open, &block{begin: word, at: i})
		case "for":
			parts[i] = keepPairs(part, strconv.Itoa(i))
			open = append(open, &block{begin: word, at: i})
		case "if", "call", "filter", "generation":
			open = append(open, &block{begin: word, at: i})
		case "set":
			inline := strings.Contains(body, "=")
			if b := loop(); b != nil && !strings.Contains(strings.SplitN(body, "=", 2)[0], ".") {
				b.sets = true
			}
			if !inline {
				open = append(open, &block{begin: word, at: i})
			}
		case "break":
			if b := loop(); b != nil {
				b.leave = append(b.leave, i)
			}
		case "else", "endif", "endfor", "endmacro", "endcall", "endfilter", "endgeneration", "endset":
			if len(open) == 0 {
				return // the library says what is wrong
			}
			b := open[len(open)-1]
			if word == "else" {
				if b.begin == "for" {
					b.ends = append(b.ends, i)
				}
				continue
			}
			if word != "end"+b.begin {
				return
			}
			open = open[:len(open)-1]
			switch {
			case b.begin == "macro":
				parts[i] = "{{ _leave() }}" + parts[i]
			case b.begin == "for" && b.sets:
				b.ends = append(b.ends, i)
				wrap(b)
			}
		}
	}
}

// keepPairs rewrites a loop over pairs that takes only some of them: the library
// does not set the two names while it chooses. So a loop before chooses.
func keepPairs(part, n string) string {
	m := pairLoop.FindStringSubmatch(part)
	if m == nil {
		return part
	}
	cut := topLevel(m[3], "if")
	if cut < 0 {
		return part
	}
	a, b, items, want := m[1], m[2], m[3][:cut], m[3][cut+len("if"):]
	return "{% set _kept" + n + " = namespace(pairs=[]) %}{% for " + a + ", " + b + " in " + items + " %}{% if " + want + " %}" +
		"{% set _kept" + n + ".pairs = _kept" + n + ".pairs + [[" + a + ", " + b + "]] %}{% endif %}{% endfor %}" +
		"{% for " + a + ", " + b + " in _kept" + n + ".pairs %}"
}

var pairLoop = regexp.MustCompile(`^\{%\s*for\s+(\w+)\s*,\s*(\w+)\s+in\b((?s:.*))%\}$`)

// topLevel is where a word stands in an expression, outside of brackets and
// quotes, or -1.
func topLevel(s, word string) int {
	nest := 0
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\'' || c == '"':
			i = endOfLiteral(s, i)
		case strings.IndexByte("([{", c) >= 0:
			nest++
		case strings.IndexByte(")]}", c) >= 0:
			nest--
		case isWord(c):
			from := i
			for i+1 < len(s) && isWord(s[i+1]) {
				i++
			}
			if nest == 0 && s[from:i+1] == word {
				return from
			}
		}
	}
	return -1
}

var statement = regexp.MustCompile(`^\s*\w+`)
