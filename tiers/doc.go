// Package tiers keeps experts in memory and says which of them must be read.
// It owns every slot's accounting: what is resident, what is in use, what is
// on its way, what leaves. It knows keys and bytes, not files, routers or
// arithmetic.
//
// A Policy says which experts leave the pool; package sim replays the routing
// of a Trace through one without a model.
//
// A Cache has three tiers, asked in this order: the memory of a Device, the
// pinned set in RAM, and the pool in RAM that the policy rules (counted as lru).
// An expert is in one of them, or a miss. A History chooses the first two. What
// a guess of the next layer has read ahead waits beside the pool for its layer.
package tiers

import "sluice/storage"

// The nouns of storage that the rooms above need.
type (
	// A Key names one routed expert.
	Key = storage.Key
	// A Model is an open model: metadata and where its tensors lie.
	Model = storage.Model
	// Meta is a model's metadata.
	Meta = storage.Meta
	// A Tensor is a weight in a file of the model.
	Tensor = storage.Tensor
	// An ExpertLayer is the role table of one MoE layer.
	ExpertLayer = storage.ExpertLayer
	// A Source reads experts.
	Source = storage.Source
	// SourceStats counts what a source did.
	SourceStats = storage.SourceStats
	// Mode is a way to read experts.
	Mode = storage.Mode
)

// MaxParts bounds the matrices of an expert.
const MaxParts = storage.MaxParts

// Parts are the matrices of an expert, in the order of its layer's roles.
type Parts = [MaxParts][]byte
