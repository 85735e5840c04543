package chat

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// ownJSON is the name of our tojson in a rewritten template: the library's own
// cannot be replaced under its name.
const ownJSON = "_tojson"

func raise(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	msg := "no reason given"
	if len(args) > 0 && args[0].IsString() {
		msg = args[0].AsString()
	} else if len(args) > 0 {
		msg = args[0].String()
	}
	return jinja.Undefined(), &RefusedError{msg}
}

// maxRange bounds range(): no conversation has as many turns.
const maxRange = 1 << 20

func boundedRange(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	n := [3]int64{0, 0, 1} // start, stop, step
	if len(args) == 0 || len(args) > 3 {
		return jinja.Undefined(), fmt.Errorf("range takes 1 to 3 numbers, not %d", len(args))
	}
	for i, a := range args {
		if !a.IsInt() {
			return jinja.Undefined(), fmt.Errorf("range takes whole numbers, not %s", a.String())
		}
		n[i] = a.AsInt()
	}
	if len(args) == 1 {
		n[0], n[1] = 0, n[0]
	}
	start, stop, step := n[0], n[1], n[2]
	if step == 0 {
		return jinja.Undefined(), fmt.Errorf("range with step 0")
	}
	var items []jinja.Value
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		if len(items) == maxRange {
			return jinja.Undefined(), fmt.Errorf("range of more than %d numbers", maxRange)
		}
		items = append(items, jinja.NewInt(i))
	}
	return jinja.NewList(items), nil
}

// strftimeNow formats the time as C's strftime does in the C locale.
func strftimeNow(now time.Time, args []jinja.Value) (jinja.Value, error) {
	if len(args) != 1 || !args[0].IsString() {
		return jinja.Undefined(), fmt.Errorf("strftime_now takes one format")
	}
	format := args[0].AsString()
	var out strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			out.WriteByte(format[i])
			continue
		}
		i++
		strip := i < len(format) && format[i] == '-' // no leading zero
		if strip {
			i++
		}
		if i == len(format) {
			return jinja.Undefined(), fmt.Errorf("strftime_now: %q ends in the middle of a field", format)
		}
		layout, ok := strftimeLayouts[format[i]]
		field := now.Format(layout)
		switch {
		case format[i] == '%':
			field = "%"
		case format[i] == 'j':
			field = fmt.Sprintf("%03d", now.YearDay())
		case !ok:
			return jinja.Undefined(), fmt.Errorf("strftime_now: field %%%c of %q is not supported", format[i], format)
		}
		if strip {
			if field = strings.TrimLeft(field, "0"); field == "" {
				field = "0"
			}
		}
		out.WriteString(field)
	}
	return jinja.NewString(out.String()), nil
}

var strftimeLayouts = map[byte]string{
	'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'e': "_2", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM",
	'B': "January", 'b': "Jan", 'A': "Monday", 'a': "Mon", 'Z': "MST", 'z': "-0700",
	'F': "2006-01-02", 'T': "15:04:05", 'D': "01/02/06", 'R': "15:04", 'c': "Mon Jan _2 15:04:05 2006",
}

// toJSON writes a value as Python's json.dumps(value, ensure_ascii=False) does,
// with its indent, separators and sort_keys.
func toJSON(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	w := jsonWriter{item: ", ", colon: ": ", indent: -1}
	arg := func(name string, at int) jinja.Value {
		if v, ok := kwargs[name]; ok {
			return v
		}
		if at < len(args) {
			return args[at]
		}
		return jinja.Undefined()
	}
	w.ascii = arg("ensure_ascii", 1).IsTruthy()
	if v := arg("indent", 2); v.IsInt() {
		w.indent = int(min(max(v.AsInt(), 0), 16))
		w.item = ","
	}
	if v := arg("separators", 3); v.IsList() {
		items := v.AsList().Items
		if len(items) != 2 || !items[0].IsString() || !items[1].IsString() {
			return jinja.Undefined(), fmt.Errorf("tojson: separators must be two strings")
		}
		w.item, w.colon = items[0].AsString(), items[1].AsString()
	}
	w.sort = arg("sort_keys", 4).IsTruthy()
	if err := w.value(args[0], 0); err != nil {
		return jinja.Undefined(), fmt.Errorf("tojson: %w", err)
	}
	return jinja.NewString(w.out.String()), nil
}

type jsonWriter struct {
	out         strings.Builder
	item, colon string
	indent      int // spaces a level; -1: all on one line
	ascii, sort bool
}

func (w *jsonWriter) value(v jinja.Value, depth int) error {
	switch {
	case depth > maxDepth:
		return fmt.Errorf("nested deeper than %d", maxDepth)
	case v.IsNone():
		w.out.WriteString("null")
	case v.IsBool():
		w.out.WriteString(strconv.FormatBool(v.AsBool()))
	case v.IsInt():
		w.out.WriteString(strconv.FormatInt(v.AsInt(), 10))
	case v.IsFloat():
		w.out.WriteString(pythonFloat(v.AsFloat()))
	case v.IsString():
		w.text(v.AsString())
	case v.IsList():
		items := v.AsList().Items
		w.out.WriteByte('[')
		for i, item := range items {
			w.next(i, depth)
			if err := w.value(item, depth+1); err != nil {
				return err
			}
		}
		w.last(len(items), depth)
		w.out.WriteByte(']')
	case v.IsDict():
		keys := v.AsDict().OrderedKeys()
		if w.sort {
			slices.Sort(keys)
		}
		w.out.WriteByte('{')
		for i, k := range keys {
			w.next(i, depth)
			w.text(k)
			w.out.WriteString(w.colon)
			if err := w.value(v.AsDict().Data[k], depth+1); err != nil {
				return err
			}
		}
		w.last(len(keys), depth)
		w.out.WriteByte('}')
	default:
		return fmt.Errorf("%s is not JSON", v.String())
	}
	return nil
}

// next separates entry i from the one before, last the bracket from the last of n.
func (w *jsonWriter) next(i, depth int) {
	if i > 0 {
		w.out.WriteString(w.item)
	}
	w.line(depth + 1)
}

func (w *jsonWriter) last(n, depth int) {
	if n > 0 {
		w.line(depth)
	}
}

func (w *jsonWriter) line(depth int) {
	if w.indent >= 0 {
		w.out.WriteByte('\n')
		w.out.WriteString(strings.Repeat(" ", w.indent*depth))
	}
}

func (w *jsonWriter) text(s string) {
	w.out.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			w.out.WriteByte('\\')
			w.out.WriteRune(r)
		case r == '\n':
			w.out.WriteString(`\n`)
		case r == '\r':
			w.out.WriteString(`\r`)
		case r == '\t':
			w.out.WriteString(`\t`)
		case r == '\b':
			w.out.WriteString(`\b`)
		case r == '\f':
			w.out.WriteString(`\f`)
		case r < ' ' || w.ascii && r > '~' && r <= 0xFFFF:
			fmt.Fprintf(&w.out, `\u%04x`, r)
		case w.ascii && r > 0xFFFF:
			r -= 0x10000
			fmt.Fprintf(&w.out, `\u%04x\u%04x`, 0xD800+r>>10, 0xDC00+r&0x3FF)
		default:
			w.out.WriteRune(r)
		}
	}
	w.out.WriteByte('"')
}

// pythonFloat is repr(f): the shortest digits, a point always, an exponent
// below 1e-4 and from 1e16.
func pythonFloat(f float64) string {
	if a := math.Abs(f); f == 0 || a >= 1e-4 && a < 1e16 {
		s := strconv.FormatFloat(f, 'f', -1, 64)
		if !strings.Contains(s, ".") && !math.IsNaN(f) {
			s += ".0"
		}
		return s
	}
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	return strconv.FormatFloat(f, 'e', -1, 64)
}

// formatFilter is Jinja's format: the % operator of Python, for %s, %d, %i,
// %f, %x and %%, by position.
func formatFilter(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 || !args[0].IsString() {
		return jinja.Undefined(), fmt.Errorf("format applies to a text")
	}
	format, rest := args[0].AsString(), args[1:]
	var out strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			out.WriteByte(format[i])
			continue
		}
		from := i
		for i++; i < len(format) && strings.IndexByte("0123456789.+- ", format[i]) >= 0; i++ {
		}
		if i == len(format) {
			return jinja.Undefined(), fmt.Errorf("format: %q ends in the middle of a field", format)
		}
		if format[i] == '%' {
			out.WriteByte('%')
			continue
		}
		if len(rest) == 0 {
			return jinja.Undefined(), fmt.Errorf("format: too few values for %q", format)
		}
		if i-from > 8 {
			return jinja.Undefined(), fmt.Errorf("format: field %q is too long", format[from:i+1])
		}
		v, flags := rest[0], format[from:i]
		rest = rest[1:]
		switch verb := format[i]; {
		case verb == 's' && v.IsString():
			fmt.Fprintf(&out, flags+"s", v.AsString())
		case verb == 's':
			fmt.Fprintf(&out, flags+"s", v.String())
		case (verb == 'd' || verb == 'i') && v.IsInt():
			fmt.Fprintf(&out, flags+"d", v.AsInt())
		case verb == 'x' && v.IsInt():
			fmt.Fprintf(&out, flags+"x", v.AsInt())
		case verb == 'f' && v.IsNumber():
			f, ok := 0.0, v.IsInt()
			if ok {
				f = float64(v.AsInt())
			} else {
				f = v.AsFloat()
			}
			fmt.Fprintf(&out, flags+"f", f)
		default:
			return jinja.Undefined(), fmt.Errorf("format: field %%%c of %q does not take %s", verb, format, v.String())
		}
	}
	if len(rest) > 0 {
		return jinja.Undefined(), fmt.Errorf("format: too many values for %q", format)
	}
	return jinja.NewString(out.String()), nil
}

// split is Python's str.split, or rsplit, with a limit: a text, a separator or
// none, and at most so many cuts.
func split(args []jinja.Value, kwargs map[string]jinja.Value, fromRight bool) (jinja.Value, error) {
	arg := func(name string, at int) jinja.Value {
		if v, ok := kwargs[name]; ok {
			return v
		}
		if at < len(args) {
			return args[at]
		}
		return jinja.None()
	}
	sep, limit := arg("sep", 1), arg("maxsplit", 2)
	if len(args) == 0 || !args[0].IsString() || !sep.IsNone() && (!sep.IsString() || sep.AsString() == "") || !limit.IsNone() && !limit.IsInt() {
		return jinja.Undefined(), fmt.Errorf("split takes a text, a separator that is not empty and a whole number")
	}
	text, most := args[0].AsString(), int64(-1)
	if limit.IsInt() {
		most = limit.AsInt()
	}
	var parts []jinja.Value
	cut := func(s string) { parts = append(parts, jinja.NewString(s)) }
	for n := int64(0); most < 0 || n < most; n++ {
		at, size := 0, 0 // of the next separator
		switch {
		case sep.IsString() && fromRight:
			at, size = strings.LastIndex(text, sep.AsString()), len(sep.AsString())
		case sep.IsString():
			at, size = strings.Index(text, sep.AsString()), len(sep.AsString())
		case fromRight:
			text = strings.TrimRight(text, whiteSpace)
			if at = strings.LastIndexAny(text, whiteSpace); at >= 0 {
				_, size = utf8.DecodeRuneInString(text[at:])
			}
		default:
			text = strings.TrimLeft(text, whiteSpace)
			if at = strings.IndexAny(text, whiteSpace); at >= 0 {
				_, size = utf8.DecodeRuneInString(text[at:])
			}
		}
		if at < 0 {
			break
		}
		if fromRight {
			cut(text[at+size:])
			text = text[:at]
		} else {
			cut(text[:at])
			text = text[at+size:]
		}
	}
	if sep.IsNone() && fromRight { // white space between the rest and what was cut off
		text = strings.TrimRight(text, whiteSpace)
	} else if sep.IsNone() {
		text = strings.TrimLeft(text, whiteSpace)
	}
	if text != "" || !sep.IsNone() {
		cut(text)
	}
	if fromRight {
		slices.Reverse(parts)
	}
	return jinja.NewList(parts), nil
}

// anyOf says whether a text has one of several beginnings or ends.
func anyOf(args []jinja.Value, has func(s, part string) bool) (jinja.Value, error) {
	if len(args) != 2 || !args[0].IsString() || !args[1].IsList() {
		return jinja.Undefined(), fmt.Errorf("startswith and endswith take a text, or several in brackets, and no places")
	}
	for _, part := range args[1].AsList().Items {
		if !part.IsString() {
			return jinja.Undefined(), fmt.Errorf("startswith and endswith take texts, not %s", part.String())
		}
		if has(args[0].AsString(), part.AsString()) {
			return jinja.NewBool(true), nil
		}
	}
	return jinja.NewBool(false), nil
}
