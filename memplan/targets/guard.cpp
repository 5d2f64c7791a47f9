// What autograd's engine asks of a device of CUDA, answered without a driver: one device, whose streams do nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <cstring>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::impl::FakeGuardImpl<kCuda> current;

  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override { return current.exchangeDevice(device); }
  c10::Device getDevice() const override { return current.getDevice(); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current.setDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current.uncheckedSetDevice(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.index() < 0 ? 0 : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCuda, index), 0);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

Guard guard;

constexpr int kSlots = 60, kBefore = 2;  // of a virtual table: what is copied, and the words before its first function
void* table[kBefore + kSlots];

bool yes(void*, signed char) { return true; }

}  // namespace

// Registers the guard. `hooks` is at::detail::getCUDAHooks(), whose table is replaced by a copy in which the fifth function
// (hasPrimaryContext) says yes; in a build without CUDA, so do the third and fourth (isBuilt, isAvailable).
extern "C" void stand_in(void** hooks, int without_cuda) {
  std::memcpy(table, static_cast<void**>(*hooks) - kBefore, sizeof(table));
  table[kBefore + 4] = reinterpret_cast<void*>(&yes);
  if (without_cuda) table[kBefore + 2] = table[kBefore + 3] = reinterpret_cast<void*>(&yes);
  *hooks = table + kBefore;
  c10::impl::DeviceGuardImplRegistrar(kCuda, &guard);
}
