package vulkan

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// messages are what the validation layers say, warnings and errors.
type messages struct {
	mu       sync.Mutex
	heard    []string
	callback uintptr
	handle   uint64
}

// chain gives a messenger for the creation of the instance itself.
func (m *messages) chain(a *arena) uintptr {
	if m.callback == 0 {
		m.callback = purego.NewCallback(func(severity, kind, data, user uintptr) uintptr {
			// VkDebugUtilsMessengerCallbackDataEXT: the message is the pointer at byte 40.
			text := *(**byte)(unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&data)), 40))
			m.mu.Lock()
			m.heard = append(m.heard, cString(unsafe.Slice(text, 4096)))
			m.mu.Unlock()
			return 0
		})
	}
	return addr(m.info(a))
}

func (m *messages) info(a *arena) *debugMessengerCreateInfo {
	const warnings, errors, general, validation, performance = 0x100, 0x1000, 1, 2, 4
	return put(a, debugMessengerCreateInfo{header: header{sType: stDebugMessengerCreate}, severities: warnings | errors,
		types: general | validation | performance, callback: m.callback})
}

func (m *messages) listen(in *Instance) error {
	create := in.proc("vkCreateDebugUtilsMessengerEXT")
	if create == 0 {
		return fmt.Errorf("vulkan: the validation layers are not installed (package vulkan-validationlayers)")
	}
	h := put(in.a, uint64(0))
	err := check("vkCreateDebugUtilsMessengerEXT", create.call(in.handle, addr(m.info(in.a)), 0, addr(h)))
	m.handle = *h
	return err
}

func (m *messages) close(in *Instance) {
	if m.handle != 0 {
		in.proc("vkDestroyDebugUtilsMessengerEXT").call(in.handle, uintptr(m.handle), 0)
		m.handle = 0
	}
}

// Validation is what the validation layers have said so far.
func (in *Instance) Validation() []string {
	in.messages.mu.Lock()
	defer in.messages.mu.Unlock()
	return append([]string(nil), in.messages.heard...)
}
