// Package moe runs Mixture-of-Experts language models: one page per family
// (glm4moe.go, mixtral.go, ...) over shared pieces (attention, router, experts),
// the decode loop, the sampler and the measures of a model (perplexity).
//
// It decides what is computed; a backend computes it, tiers bring the experts.
package moe
