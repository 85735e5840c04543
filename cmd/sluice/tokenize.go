package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strings"

	"sluice/cmd/engine"
	"sluice/moe/tokenizer"
	"sluice/storage"
)

func tokenizeCommand(ctx context.Context, s streams, args []string) error {
	f, asJSON := newFlags(s, "tokenize", "turn text on standard input into token ids, one a line, as run would see it: special tokens parsed, BOS where the model wants it")
	model := modelFlag(f)
	cases := f.Bool("cases", false, "read many texts, each ended by a line __ggml_vocab_test__; print one line of ids for each, without BOS, special tokens not parsed")
	if err := parse(f, args); err != nil {
		return err
	}
	path, err := oneModel(*model, f.Args())
	if err != nil {
		return err
	}
	file, err := storage.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	t, err := engine.Tokenizer(file)
	if err != nil {
		return err
	}
	var all [][]int32
	if *cases {
		text, err := readFile(ctx, s, "-")
		if err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		texts, err := tokenizer.ReadCases(bytes.NewReader(text))
		if err != nil {
			return err
		}
		for _, text := range texts {
			ids, err := t.Encode(text, false)
			if err != nil {
				return err
			}
			all = append(all, ids)
		}
	} else {
		text, err := readFile(ctx, s, "-")
		if err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		ids, err := t.EncodePrompt(string(text))
		if err != nil {
			return err
		}
		all = append(all, ids)
	}
	switch {
	case *asJSON && *cases:
		return printJSON(s.out, map[string]any{"cases": all})
	case *asJSON:
		return printJSON(s.out, map[string]any{"token_ids": all[0]})
	}
	w := bufio.NewWriter(s.out)
	for _, ids := range all {
		words := strings.Trim(fmt.Sprint(ids), "[]")
		if !*cases {
			words = strings.ReplaceAll(words, " ", "\n")
		}
		if words != "" || *cases {
			fmt.Fprintln(w, words)
		}
	}
	return w.Flush()
}

// oneModel is the model of a command that takes nothing else.
func oneModel(flag string, args []string) (string, error) {
	if len(args) > 0 && args[0] == "" {
		return "", errEmptyModel
	}
	if flag == "" && len(args) > 0 {
		flag, args = args[0], args[1:]
	}
	if len(args) > 0 {
		return "", usagef("unexpected argument %q", args[0])
	}
	return modelPath(flag)
}
