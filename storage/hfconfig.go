package storage

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

const (
	configPrefix = "config."
	maxDepthJSON = 32      // objects in objects
	maxEntries   = 1 << 18 // of a config.json
)

// flattenConfig makes entries of a config.json: numbers, strings and truth values
// under "config." and the path to them, by dots; an array of such as an array,
// any other by the numbers of its elements; null and empty arrays not at all.
//
// A text_config, as models have that see or hear too, is put at the top, where it
// goes before what stands there.
func flattenConfig(file string, b []byte) ([]KV, error) {
	bad := func(format string, args ...any) ([]KV, error) {
		return nil, &FormatError{File: file, Off: -1, Msg: fmt.Sprintf(format, args...)}
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var top map[string]any
	if err := d.Decode(&top); err != nil {
		return bad("it is no JSON object: %v; download it again", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return bad("there is text after its object; download it again")
	}
	if text, ok := top["text_config"].(map[string]any); ok {
		delete(top, "text_config")
		for k, v := range text {
			if v != nil {
				top[k] = v
			}
		}
	}
	f := flattener{}
	if err := f.object(configPrefix, top, 0); err != nil {
		return bad("%v", err)
	}
	return f.kvs, nil
}

type flattener struct{ kvs []KV }

func (f *flattener) object(prefix string, o map[string]any, depth int) error {
	for _, k := range slices.Sorted(maps.Keys(o)) {
		if err := f.value(prefix+k, o[k], depth); err != nil {
			return err
		}
	}
	return nil
}

func (f *flattener) value(key string, v any, depth int) error {
	if depth > maxDepthJSON {
		return fmt.Errorf("%.60q: it nests deeper than %d", key, maxDepthJSON)
	}
	switch v := v.(type) {
	case nil:
		return nil
	case map[string]any:
		return f.object(key+".", v, depth+1)
	case []any:
		if len(v) == 0 {
			return nil
		}
		if a := scalars(v); a != nil {
			return f.add(key, a)
		}
		for i, x := range v {
			if err := f.value(key+"."+strconv.Itoa(i), x, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	x, err := scalar(v)
	if err != nil {
		return fmt.Errorf("%.60q: %w", key, err)
	}
	return f.add(key, x)
}

func (f *flattener) add(key string, v any) error {
	if len(f.kvs) == maxEntries {
		return fmt.Errorf("it has more than %d entries", maxEntries)
	}
	f.kvs = append(f.kvs, KV{key, v})
	return nil
}

// scalar is a string, a bool, an int64 or a float64.
func scalar(v any) (any, error) {
	n, ok := v.(json.Number)
	if !ok {
		return v, nil
	}
	if !strings.ContainsAny(n.String(), ".eE") {
		if i, err := n.Int64(); err == nil {
			return i, nil
		}
	}
	x, err := n.Float64()
	if err != nil {
		return nil, errors.New("the number " + n.String() + " is out of range")
	}
	return x, nil
}

// scalars is an array of one kind, integers beside floats as floats; nil if the
// elements are no scalars, or of several kinds.
func scalars(v []any) any {
	var ints []int64
	var floats []float64
	var bools []bool
	var texts []string
	for _, e := range v {
		x, err := scalar(e)
		if err != nil {
			return nil
		}
		switch x := x.(type) {
		case int64:
			ints, floats = append(ints, x), append(floats, float64(x))
		case float64:
			floats = append(floats, x)
		case bool:
			bools = append(bools, x)
		case string:
			texts = append(texts, x)
		}
	}
	switch len(v) {
	case len(ints):
		return ints
	case len(floats):
		return floats
	case len(bools):
		return bools
	case len(texts):
		return texts
	}
	return nil
}
