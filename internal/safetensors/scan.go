package safetensors

import (
	"bytes"
	"encoding/json"
)

// A scanner reads the JSON that headers and indexes are written as: plain strings
// and integers without spaces in odd places. What is any more than that it leaves to
// encoding/json, which is the meaning of it and ten times as slow: the 140,000 tensors
// of the largest models would take it half a second. A method that returns false has
// met something that it does not know.
type scanner struct {
	b []byte
	i int
}

// next skips space and gives the byte that follows, 0 at the end.
func (s *scanner) next() byte {
	for ; s.i < len(s.b); s.i++ {
		switch c := s.b[s.i]; c {
		case ' ', '\n', '\r', '\t':
		default:
			return c
		}
	}
	return 0
}

// take skips the byte c.
func (s *scanner) take(c byte) bool {
	if s.next() != c {
		return false
	}
	s.i++
	return true
}

// text is a string of printable ASCII without escapes.
func (s *scanner) text() ([]byte, bool) {
	if !s.take('"') {
		return nil, false
	}
	for at := s.i; s.i < len(s.b); s.i++ {
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return s.b[at : s.i-1], true
		case c == '\\' || c < 0x20 || c >= 0x80:
			return nil, false
		}
	}
	return nil, false
}

// number is an integer of at most 18 digits.
func (s *scanner) number() (n int64, ok bool) {
	s.next()
	at := s.i
	for ; s.i < len(s.b) && s.b[s.i]-'0' <= 9; s.i++ {
		n = n*10 + int64(s.b[s.i]-'0')
		if s.i-at == 18 {
			return 0, false
		}
	}
	return n, s.i > at && (s.b[at] != '0' || s.i == at+1)
}

// numbers appends a list of them to dst.
func (s *scanner) numbers(dst []int64) ([]int64, bool) {
	if !s.take('[') {
		return dst, false
	}
	if s.take(']') {
		return dst, true
	}
	for {
		n, ok := s.number()
		dst = append(dst, n)
		switch {
		case !ok:
			return dst, false
		case s.take(']'):
			return dst, true
		case !s.take(','):
			return dst, false
		}
	}
}

// object calls member for the key of each member, which reads the value.
func (s *scanner) object(member func(key []byte) bool) bool {
	if !s.take('{') {
		return false
	}
	if s.take('}') {
		return true
	}
	for {
		key, ok := s.text()
		switch {
		case !ok || !s.take(':') || !member(key):
			return false
		case s.take('}'):
			return true
		case !s.take(','):
			return false
		}
	}
}

// end says that only what may stand behind a header follows.
func (s *scanner) end() bool { return len(bytes.TrimRight(s.b[s.i:], " \n\r\t\x00")) == 0 }

// An entry is a tensor as a header has it.
type entry struct {
	name    string
	dtype   DType
	shape   []int64
	offsets [2]int64
}

// dtypes spell the types, so that each is there once.
var dtypes = func() map[string]DType {
	all := make(map[string]DType, len(sizes))
	for t := range sizes {
		all[string(t)] = t
	}
	return all
}()

// scanHeader is the entries of a header, false if it is not as the scanner knows it.
func scanHeader(b []byte) (entries []entry, ok bool) {
	s := scanner{b: b}
	entries = make([]entry, 0, len(b)/128)
	numbers := make([]int64, 0, len(b)/64) // the shapes, one behind the other
	meta := false
	ok = s.object(func(name []byte) bool {
		if string(name) == "__metadata__" {
			again := meta
			meta = true
			return !again && s.object(func([]byte) bool { _, ok := s.text(); return ok })
		}
		e := entry{name: string(name)}
		var seen [3]bool
		if !s.object(func(key []byte) bool {
			k, ok := 0, false
			switch string(key) {
			case "dtype":
				var t []byte
				if t, ok = s.text(); ok {
					e.dtype, ok = dtypes[string(t)]
				}
			case "shape":
				k = 1
				at := len(numbers)
				numbers, ok = s.numbers(numbers)
				e.shape = numbers[at:len(numbers):len(numbers)]
			case "data_offsets":
				k = 2
				at := len(numbers)
				numbers, ok = s.numbers(numbers)
				if ok = ok && len(numbers) == at+2; ok {
					e.offsets = [2]int64(numbers[at:])
				}
				numbers = numbers[:at]
			}
			again := seen[k]
			seen[k] = true
			return ok && !again
		}) {
			return false
		}
		entries = append(entries, e)
		return seen == [3]bool{true, true, true}
	})
	return entries, ok && s.end()
}

// ParseIndex reads the JSON of an index: which file has which tensor, as its
// weight_map says; nil if there is none.
func ParseIndex(b []byte) (map[string]string, error) {
	if files, ok := scanIndex(b); ok {
		return files, nil
	}
	var x struct {
		Map map[string]string `json:"weight_map"`
	}
	err := json.Unmarshal(b, &x)
	return x.Map, err
}

func scanIndex(b []byte) (files map[string]string, ok bool) {
	s := scanner{b: b}
	shards := map[string]string{} // each name once
	meta := false
	ok = s.object(func(key []byte) bool {
		switch {
		case string(key) == "metadata" && !meta:
			meta = true
			return s.object(func([]byte) bool {
				if s.next() == '"' {
					_, ok := s.text()
					return ok
				}
				_, ok := s.number()
				return ok
			})
		case string(key) == "weight_map" && files == nil:
			files = make(map[string]string, len(b)/128)
			return s.object(func(name []byte) bool {
				file, ok := s.text()
				if !ok {
					return false
				}
				shard, known := shards[string(file)]
				if !known {
					shard = string(file)
					shards[shard] = shard
				}
				files[string(name)] = shard
				return true
			})
		}
		return false
	})
	return files, ok && s.next() == 0 && s.i == len(b)
}
