package doctor

import (
	"errors"
	"os"
	"path/filepath"

	"sluice/backends/cpu"
	"sluice/cmd/engine"
	"sluice/tiers"
)

// A Model is what this machine would make of a model.
type Model struct {
	Path         string   `json:"path"`
	Format       string   `json:"format,omitempty"`
	Architecture string   `json:"architecture,omitempty"`
	Name         string   `json:"name,omitempty"`
	Files        int      `json:"files"`
	FileBytes    int64    `json:"file_bytes"`
	Cap          int      `json:"cap"` // chosen for this machine
	Experts      int      `json:"experts"`
	PeakBytes    int64    `json:"projected_peak_bytes"`
	TokenBytes   int64    `json:"bytes_per_token"` // read when no expert is in memory
	Ceiling      float64  `json:"cold_tok_per_s"`  // that the drive's rate allows then; 0: not measured
	Notices      []string `json:"notices,omitempty"`
}

// A modelFile is the largest file of a model, what its drive is measured with.
type modelFile struct {
	path  string // absolute; "" where nothing can be opened
	size  int64
	files int
}

// model opens a model and plans it as a run would.
func (r *Report) model(o Options) *modelFile {
	path := o.Model
	if path == "" {
		return nil
	}
	r.Model = &Model{Path: path}
	file := &modelFile{}
	if fi, err := os.Stat(path); err == nil && fi.Mode().IsRegular() { // though it may be no model
		file.path, _ = filepath.Abs(path)
		file.size, file.files = fi.Size(), 1
	}
	if r.CPU.Kernels == "" {
		o.Kernels = cpu.Auto // that none can run is told already
	}
	p, err := engine.Prepare(engine.Options{Path: path, Prefetch: tiers.PrefetchAuto, Kernels: o.Kernels})
	if err != nil {
		var room *tiers.NoRoomError
		if errors.As(err, &room) {
			r.broken("", "the model does not fit: %v", err)
		} else {
			r.broken("", "the model cannot be used: %v", err)
		}
		return file
	}
	defer p.Close()
	m := r.Model
	m.Format, m.Architecture, m.Name = p.File.Format, p.Spec.Arch, p.Spec.Name
	m.Files, m.Cap, m.Experts, m.PeakBytes = len(p.File.Files), p.Cap.Cap, p.Spec.Experts, p.Cap.Peak
	m.Notices = p.Notices
	file.files, file.size = m.Files, 0
	for _, f := range p.File.Files {
		m.FileBytes += f.Size
		if f.Size > file.size {
			file.size = f.Size
			file.path, _ = filepath.Abs(f.Path)
		}
	}
	m.TokenBytes = p.BytesPerToken()
	return file
}

// ceiling is what the model's drive allows when nothing is in memory.
func (r *Report) ceiling() {
	if m := r.Model; m != nil && m.TokenBytes > 0 && len(r.Drives) > 0 && r.Drives[0].Places[0].What == "model" {
		m.Ceiling = r.Drives[0].Rate / float64(m.TokenBytes)
	}
}
