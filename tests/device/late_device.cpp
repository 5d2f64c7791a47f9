// A simulated device for tests: work runs as late, as early, or in as odd an order as its streams and events allow.
//
// Every kernel and copy is queued to the current stream with its operands' addresses, and runs when somebody waits for
// it. Shapes come from meta kernels, numbers from CPU kernels. Memory is given away again as soon as it is freed, to the
// stream that it was allocated on, as CUDA's caching allocator does; the host cannot read it: it is protected except
// while tasks run.
// Registered as torch's PrivateUse1 device; plain C functions at the end are called by ctypes.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2, kStreams = 33;  // stream 0 of a device is its default stream

// ---- streams: queues of tasks ------------------------------------------------------------------------------------

struct Event {
  int queue = -1;        // complete once this queue
  uint64_t count = 0;    // has run so many tasks
};
struct Task {
  std::function<void()> run;  // empty: only waits
  Event after;
  bool ends = false;  // a copy, of which the task before made the destination NaN
};
struct Queue {
  std::deque<Task> tasks;
  uint64_t done = 0, queued = 0;
};

std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
Queue queues[kDevices * kStreams];
int next_stream[kDevices] = {1, 1};
thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {0, 0};

enum Policy { kEarly, kLate, kSideFirst, kMainFirst, kRandom, kHalfDone };
int policy = kEarly;
uint64_t seed = 1;
int64_t tasks_run = 0, ran_at_once = 0, copies_waited = 0;

int queue_of(int device, int64_t stream) { return device * kStreams + static_cast<int>(stream); }
int queue_of(const c10::Stream& s) { return queue_of(s.device_index(), s.id()); }
int current_queue() { return queue_of(current_device, current_stream[current_device]); }
bool complete(const Event& e) { return e.queue < 0 || queues[e.queue].done >= e.count; }

// Device memory is one region, so that the host is kept out by one call.
constexpr size_t kRegion = size_t(1) << 32, kRound = 512;
char* region = nullptr;
int open_depth = 0;
struct Open {  // device memory may be read and written while it exists
  Open() {
    if (open_depth++ == 0) mprotect(region, kRegion, PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (--open_depth == 0) mprotect(region, kRegion, PROT_NONE);
  }
};

void run_until(int index, uint64_t count) {
  Queue& queue = queues[index];
  while (queue.done < count && !queue.tasks.empty()) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    if (task.after.queue >= 0) run_until(task.after.queue, task.after.count);
    if (task.run) {
      Open open;
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      task.run();
      tasks_run++;
    }
    queue.done++;
  }
}
uint32_t random_number() {
  seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
  return seed >> 33;
}
bool run_one(int index) {
  Queue& queue = queues[index];
  if (queue.tasks.empty() || !complete(queue.tasks.front().after)) return false;
  run_until(index, queue.done + 1);
  return true;
}
bool run_any() {
  const int all = kDevices * kStreams, first = random_number() % all;
  for (int k = 0; k < all; k++)
    if (run_one((first + k) % all)) return true;
  return false;
}
void run_all() {
  if (policy == kRandom)
    while (run_any()) {
    }
  for (int i = 0; i < kDevices * kStreams; i++) run_until(i, UINT64_MAX);
}
uint64_t push(int index, Task task) {
  Locked locked(lock);
  Queue& queue = queues[index];
  queue.tasks.push_back(std::move(task));
  queue.queued++;
  const bool main = index % kStreams == 0;
  if (policy == kEarly || (policy == kSideFirst && !main) || (policy == kMainFirst && main))
    run_until(index, queue.queued);
  if (policy == kHalfDone)
    while (!queue.tasks.empty() && (main || !queue.tasks.front().ends)) run_until(index, queue.done + 1);
  if (policy == kRandom && random_number() % 4 == 0)
    for (int n = random_number() % 6; n > 0; n--) run_any();
  return queue.queued;
}

// ---- memory: freed blocks are reused at once by their own stream -----------------------------------------------------

struct Block {
  char* at;
  size_t nbytes;
  int queue, device;
  std::vector<Event> users;  // other streams that were recorded; once freed, with what they had queued by then
};
std::map<std::pair<int, size_t>, std::vector<Block*>> spare;
std::vector<Block*> waiting;  // freed, but used by other streams
std::map<const void*, Block*> blocks;
char* top = nullptr;
int64_t allocated[kDevices] = {0, 0}, peak[kDevices] = {0, 0}, reserved[kDevices] = {0, 0};

void count(Block* b, int sign) {
  allocated[b->device] += sign * static_cast<int64_t>(b->nbytes);
  peak[b->device] = std::max(peak[b->device], allocated[b->device]);
  c10::reportMemoryUsageToProfiler(
      b->at, sign * static_cast<int64_t>(b->nbytes), allocated[b->device], 0, c10::Device(kType, b->device));
}
void release(void* context) {
  Locked locked(lock);
  auto* b = static_cast<Block*>(context);
  count(b, -1);
  for (auto& user : b->users) user.count = queues[user.queue].queued;
  if (b->users.empty())
    spare[{b->queue, b->nbytes}].push_back(b);
  else
    waiting.push_back(b);
}
void reclaim() {
  std::vector<Block*> still;
  for (auto* b : waiting) {
    if (std::all_of(b->users.begin(), b->users.end(), complete)) {
      b->users.clear();
      spare[{b->queue, b->nbytes}].push_back(b);
    } else {
      still.push_back(b);
    }
  }
  waiting.swap(still);
}
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Locked locked(lock);
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    const size_t nbytes = (n + kRound - 1) / kRound * kRound;
    if (!nbytes) return {nullptr, nullptr, nullptr, device};
    reclaim();
    auto& free = spare[{current_queue(), nbytes}];
    Block* b;
    if (free.empty()) {
      TORCH_CHECK(top + nbytes <= region + kRegion, "the late device has ", kRegion, " bytes");
      b = new Block{top, nbytes, current_queue(), current_device, {}};
      top += nbytes;
      reserved[current_device] += nbytes;
      blocks[b->at] = b;
      Open open;
      memset(b->at, 0xFF, nbytes);  // NaN, in every floating-point type
    } else {
      b = free.back();
      free.pop_back();
    }
    count(b, +1);
    return {b->at, b, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    Open open;
    memcpy(to, from, n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream s) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked(lock);
    c10::CachingDeviceAllocator::DeviceStats found;
    found.allocated_bytes[0].current = allocated[device];
    found.allocated_bytes[0].peak = peak[device];
    found.reserved_bytes[0].current = found.reserved_bytes[0].peak = reserved[device];
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { peak[device] = allocated[device]; }
} device_memory;

std::set<std::pair<uintptr_t, uintptr_t>> pinned;
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* at = nullptr;
    if (n) {
      TORCH_CHECK(!posix_memalign(&at, kRound, n));
      pinned.insert({reinterpret_cast<uintptr_t>(at), reinterpret_cast<uintptr_t>(at) + n});
    }
    return {at, at, [](void*) {}, c10::Device(c10::kCPU)};  // never freed: late copies may still use it
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  // Random numbers are those of the CPU's kernels, drawn when a task runs: tests draw on one stream, in one order.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* p) const override {
    const auto at = reinterpret_cast<uintptr_t>(p);
    auto after = pinned.upper_bound({at, UINTPTR_MAX});
    return after != pinned.begin() && at < std::prev(after)->second;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    Locked locked(lock);
    if (n) run_all();  // as CUDA, which only lets go of the bytes when nothing is left of them
    c10::DataPtr made = device_memory.allocate(n);
    if (n && storage.nbytes()) device_memory.copy_data(made.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(n);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    current_device = d.index();
    return before;
  }
  void setDevice(c10::Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return stream(index(d), current_stream[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    const int device = index(d), made = next_stream[device];
    next_stream[device] = made + 1 < kStreams ? made + 1 : 1;
    return stream(device, made);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked locked(lock);
    if (!*e) *e = new Event;
    *static_cast<Event*>(*e) = {queue_of(s), queues[queue_of(s)].queued};
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e || static_cast<Event*>(e)->queue == queue_of(s)) return;
    push(queue_of(s), {nullptr, *static_cast<Event*>(e)});
  }
  bool queryEvent(void* e) const override {
    return !e || complete(*static_cast<Event*>(e));
  }
  void synchronizeEvent(void* e) const override {
    Locked locked(lock);
    if (e) run_until(static_cast<Event*>(e)->queue, static_cast<Event*>(e)->count);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  bool queryStream(const c10::Stream& s) const override {
    return queues[queue_of(s)].tasks.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Locked locked(lock);
    run_until(queue_of(s), UINT64_MAX);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Locked locked(lock);
    run_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Locked locked(lock);
    auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second->queue != queue_of(s))
      found->second->users.push_back({queue_of(s), UINT64_MAX});
  }
  // A millisecond for each task of the queue.
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    const auto *from = static_cast<Event*>(a), *to = static_cast<Event*>(b);
    return from->queue == to->queue ? double(to->count) - double(from->count) : 1.0;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream s) { Guard().recordDataPtrOnStream(data, s); }

// ---- kernels ----------------------------------------------------------------------------------------------------

bool is_late(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

at::Tensor on_cpu(const at::Tensor& t) {  // the same bytes, which only tasks may touch
  auto data = at::DataPtr(const_cast<void*>(t.storage().data()), at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  return at::empty({0}, t.options().device(at::kCPU)).set_(storage, t.storage_offset(), t.sizes(), t.strides());
}
at::Tensor on_meta(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}
using OptionalType = std::optional<c10::ScalarType>;
at::Tensor empty(c10::IntArrayRef size, OptionalType dtype, std::optional<c10::Layout>, std::optional<c10::Device> d,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(d));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, OptionalType dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> d, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(d));
  return at::detail::empty_strided_generic(
      size, strides, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& s, c10::SymIntArrayRef size, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(s, size, strides, offset);
}
const at::Tensor& resize_(const at::Tensor& s, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(s, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor view(const at::Tensor& s, c10::SymIntArrayRef size) {
  return at::native::view(s, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& s, c10::SymIntArrayRef size, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(s, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor& set_storage(at::Tensor& r, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef strides) {
  return at::cpu::set_(r, s, offset, size, strides);
}
void record_stream(at::Tensor& t, c10::Stream s) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), s); }

// A copy runs on the current stream of the source's device, as CUDA's does, and the destination's current stream waits.
// Nobody may count on the bytes that a copy writes until it is complete: it begins by making them NaN.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& here = is_late(from) ? from : to;
  const int index = queue_of(here.device().index(), current_stream[here.device().index()]);
  const bool both = is_late(from) && is_late(to);
  const int other = queue_of(to.device().index() < 0 ? 0 : to.device().index(),
                             current_stream[to.device().index() < 0 ? 0 : to.device().index()]);
  const at::Tensor& host = is_late(from) ? to : from;
  const bool waits = !both && !(non_blocking && Hooks().isPinnedPtr(host.storage().data()));
  auto target = is_late(to) ? on_cpu(to) : to.detach();
  auto source = is_late(from) ? on_cpu(from) : from.detach();
  if (both && other != index) push(index, {nullptr, {other, queues[other].queued}});
  if ((!both || from.device() != to.device()) && target.is_contiguous())
    push(index, {[target] { memset(target.data_ptr(), 0xFF, target.nbytes()); }, {}});
  const uint64_t done = push(index, {[target, source]() mutable { target.copy_(source); }, {}, true});
  if (both && other != index) push(other, {nullptr, {index, done}});
  if (waits) {
    Locked locked(lock);
    copies_waited++;
    run_until(index, done);
  }
  return to;
}
at::Scalar item(const at::Tensor& s) {
  Locked locked(lock);
  run_until(queue_of(s.device().index(), current_stream[s.device().index()]), UINT64_MAX);
  Open open;
  return at::_local_scalar_dense(on_cpu(s));
}

template <typename F>
c10::IValue mapped(const c10::IValue& v, F f) {
  const auto one = [&](const at::Tensor& t) { return is_late(t) ? f(t) : t; };
  if (v.isTensor()) return one(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor t : v.toTensorList()) list.push_back(one(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(one(*t)) : t);
    return list;
  }
  return v;
}
c10::IValue with_device(const c10::IValue& v, c10::DeviceType type) {
  return v.isDevice() ? c10::IValue(c10::Device(type)) : v;
}
std::vector<at::Tensor> tensors_of(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> found;
  for (auto& v : stack) {
    if (v.isTensor()) found.push_back(v.toTensor());
    if (v.isTensorList())
      for (at::Tensor t : v.toTensorList()) found.push_back(t);
  }
  return found;
}
c10::Device device_of(const std::vector<c10::IValue>& args) {
  c10::Device found(kType, static_cast<c10::DeviceIndex>(current_device));
  for (auto& v : args)
    if (v.isDevice() && v.toDevice().type() == kType && v.toDevice().has_index()) found = v.toDevice();
  for (auto& t : tensors_of(args))
    if (is_late(t)) return t.device();
  return found;
}
bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

struct Quiet final : c10::WarningHandler {  // meta kernels warn of what the kernels themselves do not do
  void process(const c10::Warning&) override {}
} quiet;

// Runs an op at once, after its stream: where no meta kernel tells the shapes of its results.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack, torch::jit::Stack args, c10::Device where) {
  ran_at_once++;
  Locked locked(lock);
  run_until(queue_of(where.index(), current_stream[where.index()]), UINT64_MAX);
  {
    Open open;
    op.callBoxed(args);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& v : args) {
    if (v.isTensor() && v.toTensor().defined()) v = v.toTensor().to(where);
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (at::Tensor t : v.toTensorList()) list.push_back(t.to(where));
      v = list;
    }
    torch::jit::push(*stack, v);
  }
}

// A view that has no kernel of its own here (`unfold`): its layout is that of the meta kernel's view. Nothing is queued.
bool make_view(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::vector<c10::IValue>& args,
               const std::vector<c10::IValue>& metas) {
  const auto& schema = op.schema();
  if (schema.returns().size() != 1 || !schema.returns()[0].alias_info() || schema.returns()[0].alias_info()->isWrite())
    return false;
  for (size_t k = 0; k < args.size(); k++) {
    const auto* alias = schema.arguments()[k].alias_info();
    if (!alias || !args[k].isTensor() || !(*alias == *schema.returns()[0].alias_info())) continue;
    torch::jit::Stack made = metas;
    op.callBoxed(made);
    const auto view = made[0].toTensor(), base = args[k].toTensor();
    const int64_t offset = view.storage_offset() - metas[k].toTensor().storage_offset();
    torch::jit::drop(*stack, args.size());
    torch::jit::push(*stack, at::as_strided(base, view.sizes(), view.strides(), base.storage_offset() + offset));
    return true;
  }
  return false;
}

// Every op that is not above: results are allocated by the shapes of the meta kernel, and the CPU kernel is queued.
void queue_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), count = schema.returns().size();
  std::vector<c10::IValue> args(stack->end() - n, stack->end());
  const c10::Device where = device_of(args);
  const c10::DeviceGuard guard(where);
  std::vector<c10::IValue> metas, cpus;
  for (size_t k = 0; k < n; k++) {
    metas.push_back(with_device(mapped(args[k], on_meta), at::kMeta));
    cpus.push_back(with_device(mapped(args[k], on_cpu), at::kCPU));
    // A number in host memory is passed to a kernel when it is launched.
    if (cpus[k].isTensor() && cpus[k].toTensor().is_same(args[k].toTensor()) && cpus[k].toTensor().defined() &&
        cpus[k].toTensor().dim() == 0 && !writes(schema.arguments()[k]))
      cpus[k] = cpus[k].toTensor().clone();
  }
  if (make_view(op, stack, args, metas)) return;
  bool aliases = true, single = true, grows = false;
  for (auto& r : schema.returns()) {
    aliases &= r.alias_info() != nullptr;
    single &= r.type()->kind() == c10::TypeKind::TensorType;
  }
  for (size_t k = 0; k < n; k++)
    grows |= writes(schema.arguments()[k]) && args[k].isTensor() && args[k].toTensor().numel() == 0;
  if (count && !single) return run_now(op, stack, cpus, where);
  torch::jit::Stack made = metas;
  for (auto& v : made)
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cpu()) v = on_meta(v.toTensor());
  // The meta kernels keep the strides of their inputs; those of the CPU and of CUDA return contiguous results.
  const bool backward = schema.name() == "aten::native_layer_norm_backward";
  if (backward || schema.name() == "aten::native_layer_norm") made[0] = made[0].toTensor().contiguous();
  if (backward) made[1] = made[1].toTensor().contiguous();
  const torch::jit::Stack targets = made;
  if (count && (!aliases || grows)) {
    try {
      c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
      op.callBoxed(made);
    } catch (const std::exception&) {
      return run_now(op, stack, cpus, where);
    }
    for (size_t k = 0; k < n; k++) {
      if (!writes(schema.arguments()[k]) || !args[k].isTensor()) continue;
      if (targets[k].toTensor().sizes() == args[k].toTensor().sizes()) continue;
      at::native::resize_(args[k].toTensor(), targets[k].toTensor().sizes());
      cpus[k] = on_cpu(args[k].toTensor());
    }
  }
  std::vector<c10::IValue> results(count);
  std::vector<at::Tensor> into(count);
  for (size_t i = 0; i < count; i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      for (size_t k = 0; k < n; k++)
        if (writes(schema.arguments()[k]) && *schema.arguments()[k].alias_info() == *alias) results[i] = args[k];
    } else if (made[i].isTensor() && made[i].toTensor().defined()) {
      auto m = made[i].toTensor();
      auto result = at::empty_strided(m.sizes(), m.strides(), m.options().device(where));
      results[i] = result;
      into[i] = on_cpu(result);
    } else {
      results[i] = at::Tensor();
    }
  }
  push(current_queue(), {[op, cpus, into] {
    c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
    torch::jit::Stack run = cpus;
    op.callBoxed(run);
    const auto found = tensors_of(run);
    for (size_t i = 0; i < into.size() && i < found.size(); i++)
      if (into[i].defined() && found[i].defined() && found[i].data_ptr() != into[i].data_ptr())
        const_cast<at::Tensor&>(into[i]).copy_(found[i]);
  }, {}});
  torch::jit::drop(*stack, n);
  for (auto& r : results) torch::jit::push(*stack, std::move(r));
}

// torch sends the convolutions of such a device to ops that have no kernel anywhere; these are the CPU's.
c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { queue_op(named("aten::convolution"), stack); }
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto weight = (stack->end() - 8)->toTensor();
  const int64_t groups = (stack->end() - 2)->toInt();
  const bool transposed = (stack->end() - 4)->toBool();
  const int64_t biases = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{biases}));
  queue_op(named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // torch would compute it by a batch norm, with other strides than every kernel of its own
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&queue_op>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_op>()); }

}  // namespace late

extern "C" {
void late_register() {
  using namespace late;
  region = top = static_cast<char*>(
      mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  c10::SetAllocator(kType, &device_memory);
  at::setHostAllocator(kType, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
void late_set_policy(int policy, uint64_t seed) {
  late::Locked locked(late::lock);
  late::run_all();
  late::policy = policy;
  late::seed = seed;
}
void late_synchronize() {
  late::Locked locked(late::lock);
  late::run_all();
}
void late_sleep() { late::push(late::current_queue(), {[] {}, {}}); }
int late_device() { return late::current_device; }
void late_set_device(int device) { late::current_device = device; }
int64_t late_tasks_run() { return late::tasks_run; }
int64_t late_ran_at_once() { return late::ran_at_once; }
int64_t late_copies_waited() { return late::copies_waited; }
int64_t late_pending() {
  int64_t n = 0;
  for (auto& queue : late::queues) n += queue.tasks.size();
  return n;
}
int64_t late_peak(int device) { return late::peak[device]; }
void late_reset_peak(int device) { late::peak[device] = late::allocated[device]; }
}
