package moe

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sluice/internal/quant"
	"sluice/tiers"
)

// A Role is what a weight is for.
type Role uint8

const (
	RoleEmbedding Role = iota
	RoleAttention      // its projections, those of a gated delta net and of an indexer
	RoleDense          // feed-forward of layers without a router
	RoleShared         // shared experts
	RoleRouter
	RoleRouted // experts
	RoleNorm
	RoleHead
	RoleDraft // all of drafting (MTP) layers
	RoleOther // biases of experts, rotations
	roles
)

func (r Role) String() string {
	return [roles]string{"embedding", "attention", "dense FF", "shared expert", "router", "routed experts", "norms", "head", "MTP", "other"}[r]
}

// A Weight is a tensor that a model uses.
type Weight struct {
	tiers.Tensor
	Role   Role
	Routed bool // experts, of a drafting layer too
	inner  Role // of a drafting layer's tensor: what it is for there; else Role
	matrix bool // of any type of weights: rows that are multiplied, or looked up
}

// Weights lists what the model uses, each tensor once: first what is resident, then
// the parts of experts.
func (s *Spec) Weights() []Weight {
	var all []Weight
	seen := map[string]bool{}
	add := func(w Weight) {
		if !seen[w.Name] {
			seen[w.Name] = true
			all = append(all, w)
		}
	}
	for i, t := range slices.Concat(s.Dense, s.NextnDense) {
		a := s.asked[i]
		w := Weight{Tensor: t, inner: roleOf(a.name), matrix: a.matrix}
		if w.Role = w.inner; layerOf(a.name) >= s.Layers {
			w.Role = RoleDraft
		}
		add(w)
	}
	for i, r := range slices.Concat(s.Roles, s.NextnRoles) {
		role := RoleRouted
		if i >= len(s.Roles) {
			role = RoleDraft
		}
		for _, part := range r.Parts {
			if t, ok := s.file.Tensor(part); ok {
				add(Weight{Tensor: t, Role: role, inner: RoleRouted, Routed: true, matrix: true})
			}
		}
	}
	return all
}

// asked is by which of GGUF's names a page asked for a tensor, and as what.
type asked struct {
	name   string
	matrix bool
}

// roleOf is the role of the tensor that GGUF has under that name.
func roleOf(name string) Role {
	if rest, ok := strings.CutPrefix(name, "blk."); ok {
		_, name, _ = strings.Cut(rest, ".")
	}
	is := func(prefixes ...string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
	}
	switch {
	case strings.Contains(name, "norm"):
		return RoleNorm
	case strings.Contains(name, "_exps"):
		return RoleOther
	case strings.Contains(name, "shexp"):
		return RoleShared
	case is("ffn_gate_inp", "exp_probs_b"):
		return RoleRouter
	case is("ffn_"):
		return RoleDense
	case is("attn_", "ssm_", "indexer."):
		return RoleAttention
	case is("token_embd"):
		return RoleEmbedding
	case is("output."):
		return RoleHead
	}
	return RoleOther
}

// layerOf is the layer of the tensor that GGUF has under that name, -1: of none.
func layerOf(name string) int {
	_, no := numbered(name)
	n, err := strconv.Atoi(no)
	if err != nil {
		return -1
	}
	return n
}

// A Requantization says which weights of floats become of which type; the zero
// value, F32, leaves them as they are.
type Requantization struct {
	Experts quant.Type // routed experts of the layers that decode
	Dense   quant.Type // matrices of attention, feed-forward and shared experts, embedding and head
	Draft   quant.Type // matrices and experts of drafting (MTP) layers
}

// Requantize plans it: the new types of tensors, by name, for storage.Pack, and in
// words what is not as asked. Where columns are no multiple of a type's blocks it
// takes Q8_0, or leaves the tensor as it is; what is quantized already stays. Nothing
// to requantize is an error.
func (s *Spec) Requantize(q Requantization) (types map[string]quant.Type, notes []string, err error) {
	types = map[string]quant.Type{}
	count := map[string]int{} // tensors, by what is to be said
	for _, w := range s.Weights() {
		to := q.Dense
		switch {
		case w.Role == RoleDraft:
			to = q.Draft
		case w.Routed:
			to = q.Experts
		}
		if w.inner == RoleNorm || w.inner == RoleRouter { // small, and every bit counts
			continue
		}
		if to == quant.F32 || to == w.Type || !w.matrix {
			continue
		}
		as := func(what string) { count[fmt.Sprintf("%s: %%d tensors of %v %s", w.Role, w.Type, what)]++ }
		block, _ := to.Block()
		cols := int(w.Dims[0])
		switch {
		case w.Type.Kind() != quant.Float:
			as("are quantized already: they stay as they are")
		case !w.Routed && strings.ContainsAny(w.Name, "*["):
			as("are made of others: they stay as they are")
		case to.Fits(cols):
			types[w.Name] = to
		case quant.Q8_0.Fits(cols):
			types[w.Name] = quant.Q8_0
			as(fmt.Sprintf("have %d columns, no multiple of the %d of a block of %v: Q8_0 instead", cols, block, to))
		default:
			as(fmt.Sprintf("have %d columns, no multiple of the %d of a block of %v: they stay as they are", cols, block, to))
		}
	}
	for _, words := range slices.Sorted(maps.Keys(count)) {
		notes = append(notes, fmt.Sprintf(words, count[words]))
	}
	if len(types) == 0 {
		said := strings.Join(notes, "; ")
		if said == "" {
			said = "the model has no such weights"
		}
		return nil, nil, errors.New("nothing to requantize: " + said + ". Pack without it, or take the model in F32, F16, BF16 or FP8")
	}
	if below8(q.Draft) && s.Nextn > 0 {
		notes = append(notes, fmt.Sprintf("warning: the drafting (MTP) layers become %v: below 8 bits far fewer drafts are accepted; q8_0 costs little", q.Draft))
	}
	return types, notes, nil
}

// below8 says whether a type takes less than 8 bits for a weight.
func below8(t quant.Type) bool {
	elems, bytes := t.Block()
	return bytes < elems
}
