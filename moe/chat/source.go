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
			return "", fmt.Errorf("line %d: %w", 1+strings.Count(r.src[:min(r.pos, len(r.src))], "\n"), err)
		}
	}
	return r.out.String(), nil
}

type rewriter struct {
	src       string
	pos       int
	lineStart bool // the tag before pos took the end of its line with it, or there is none
	out       strings.Builder
}

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

// whiteSpace is what Python's \s matches of ASCII.
const whiteSpace = " \t\n\r\f\v"

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
		r.out.WriteString(`{{"`)
		r.out.WriteString(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(kept))
		r.out.WriteString(`"}}`)
	}
	r.lines(text[len(kept):])
}

// lines keeps the count of lines right where s was left out.
func (r *rewriter) lines(s string) {
	if n := strings.Count(s, "\n"); n > 0 {
		r.out.WriteString("{#" + strings.Repeat("\n", n) + "#}")
	}
}

// tag rewrites an expression or statement that begins at at, its content at pos.
func (r *rewriter) tag(at, pos int, kind byte) error {
	open, end, what := "{{ ", "}}", "expression"
	if kind == '%' {
		open, end, what = "{% ", "%}", "statement"
	}
	var out strings.Builder
	var nest []byte  // closing brackets that are due
	var splits []int // depths of argument lists of split()
	last := byte(0)  // the last character that is not white space
	word := ""       // the last identifier
	for pos < len(r.src) {
		c := r.src[pos]
		if len(nest) == 0 {
			sign := byte(0)
			if c == '-' || kind == '%' && c == '+' {
				sign = c
			}
			if closed := pos + min(int(sign), 1); strings.HasPrefix(r.src[closed:], end) {
				if err := checkTag(out.String(), kind); err != nil {
					return err
				}
				r.out.WriteString(open + out.String() + " " + end)
				r.afterTag(closed+2, kind, sign)
				return nil
			}
		}
		switch {
		case c == '\'' || c == '"':
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
			nest = append(nest, map[byte]byte{'(': ')', '[': ']', '{': '}'}[c])
			if c == '(' && last == 'a' && word == "split" {
				splits = append(splits, len(nest))
			}
		case c == ')' || c == ']' || c == '}':
			if len(nest) == 0 || nest[len(nest)-1] != c {
				return fmt.Errorf("%q in this %s closes nothing", c, what)
			}
			if len(splits) > 0 && splits[len(splits)-1] == len(nest) {
				splits = splits[:len(splits)-1]
			}
			nest = nest[:len(nest)-1]
			if last == '}' {
				out.WriteByte(' ') // or the library would see the end of the tag
			}
		case c == ',' && len(splits) > 0 && splits[len(splits)-1] == len(nest):
			return fmt.Errorf("split with a limit is not supported")
		case strings.IndexByte(whiteSpace, c) >= 0:
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

func isWord(c byte) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

var setTarget = regexp.MustCompile(`^\s*set\s+[A-Za-z_]\w*(\s*\.\s*[A-Za-z_]\w*)?\s*(=[^=]|$)`)

// checkTag refuses what the library would take and get wrong.
func checkTag(body string, kind byte) error {
	body = strings.TrimSpace(body)
	if body == "" {
		return fmt.Errorf("an empty tag")
	}
	if kind == '%' && strings.HasPrefix(body, "set") && !isWord((body + " ")[3]) && !setTarget.MatchString(body) {
		return fmt.Errorf("set takes one name, or a namespace and a name: %q", body)
	}
	return nil
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
