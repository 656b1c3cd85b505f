// A device on torch's PrivateUse1 whose work is done as late as it may be.
//
// Real devices are late only sometimes. This one always is, so that code that relies on luck fails:
//
//   * Work on a stream is done when a thread waits for it (for an event, a stream, the device, or
//     a blocking copy to the host), and not before. Querying an event does no work.
//   * A copy from pinned or registered memory reads that memory when it is done. A copy from
//     pageable memory reads it at once, as CUDA stages such copies.
//   * A copy from one device to the other is done on the first one's current stream, after what the
//     other one's current stream has to do, and that waits for it: as torch's for CUDA.
//   * Freed device memory is reused by its own stream at once. Where other streams were recorded,
//     it is reused when these have done the work they had when it was freed.
//   * Registered memory is read through references to the very pages that were there when it was
//     registered (they are held by pipes), as a real device does. Pages that replaced them later
//     are not seen.
//   * A thread that has not called the device since it was selected has no context: registering
//     is refused, as CUDA's driver does.
//   * While a graph is captured, calls that end a capture are noted, unless their thread has
//     relaxed its mode.
//   * A device can be made to fail: from then on everything that it is asked for raises.
//
// The functions at the end are called through ctypes. They switch the device on and off, hold its
// work back, return counts, and are the driver that `shmloader.device.backend` calls.

#include <ATen/core/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kBlockBytes = 512;
constexpr size_t kPage = 4096;
// A pipe holds so many pages at most, unless an administrator allows for more.
constexpr size_t kPipePages = 256;

enum Counter {
  kLateCopies,  // host to device, of pinned or registered memory
  kPageableCopies,  // host to device, of any other
  kDeviceCopies,  // device to device
  kHostCopies,  // device to host
  kAllocations,
  kNewBlocks,
  kReservedBytes,
  kUsedBytes,
  kMostUsedBytes,
  kRecordedStreams,
  kNewStreams,
  kEvents,
  kEventWaits,  // a thread waits for an event
  kStreamWaits,  // a stream waits for an event
  kSynchronizations,  // a thread waits for a stream or a device
  kRegistered,
  kUnregistered,
  kRegisteredBytes,
  kMostRegisteredBytes,
  kHostBlocks,  // of pinned memory that were new
  kInitializations,
  kCaptureBreaks,
  kFaults,  // a copy of memory that was registered and is no more
  kWaiting,  // threads that wait for work that is held back
  kStreamLookups,  // the current stream was asked for
  kForksInside,  // a process was forked while the loader's thread was inside
  kCounters,
};

struct Position;

struct Operation {
  std::function<void()> run;
  std::shared_ptr<Position> awaits;
};

struct LateStream {
  int device;
  std::deque<Operation> operations;
  uint64_t put = 0;
  uint64_t done = 0;
};

// A place in a stream; over when all that was put there before is done.
struct Position {
  LateStream* stream = nullptr;
  uint64_t number = 0;
  bool is_over() const {
    return stream == nullptr || stream->done >= number;
  }
};

struct Block {
  char* memory;
  size_t nbytes;
  LateStream* stream;
  std::set<LateStream*> used_by;
};

struct Freed {
  Block* block;
  std::vector<Position> awaits;
};

// Memory that was registered, and its pages, each pipe with some.
struct Registration {
  size_t nbytes;
  std::vector<std::pair<int, int>> pipes;
  size_t pages_held = 0;
};

// One for the process. Never destroyed: tensors may be freed at the very end.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_on = false;
  bool is_held = false;
  bool is_capturing = false;
  bool is_initialized = false;
  // Copies until the device fails, and its error; -1: it does not.
  int64_t copies_left[kDevices] = {-1, -1};
  bool has_failed[kDevices] = {false, false};
  std::vector<std::unique_ptr<LateStream>> streams[kDevices];
  std::map<std::pair<LateStream*, size_t>, std::vector<Block*>> free;
  std::vector<Freed> freed;
  std::map<uintptr_t, Registration> registered;
  // Of torch's host allocator.
  std::map<uintptr_t, size_t> pinned;
  int64_t counts[kCounters] = {};

  World() {
    for (int device = 0; device < kDevices; ++device) {
      streams[device].push_back(std::make_unique<LateStream>(LateStream{device}));
    }
  }
};

World& world() {
  static World* the_world = new World();
  return *the_world;
}

thread_local int current_device = 0;
thread_local int64_t current_streams[kDevices] = {0, 0};
thread_local bool has_context = false;
thread_local bool is_relaxed = false;

// Threads of the loader that are inside a call of the device. No process may be forked meanwhile.
std::atomic<int> loader_threads_inside{0};

struct Lock : std::unique_lock<std::mutex> {
  explicit Lock(std::mutex& mutex) : std::unique_lock<std::mutex>(mutex, std::defer_lock) {
    char name[16] = {};
    prctl(PR_GET_NAME, name);
    is_loaders = std::strncmp(name, "shmloader", 9) == 0 || std::strcmp(name, "pt_data_pin") == 0;
    loader_threads_inside += is_loaders;
    lock();
  }
  ~Lock() {
    loader_threads_inside -= is_loaders;
  }
  bool is_loaders;
};

void check(int device) {
  has_context = true;
  if (!world().is_initialized) {
    world().is_initialized = true;
    world().counts[kInitializations]++;
  }
  TORCH_CHECK(!world().has_failed[device], "late error 700: an illegal memory access on device ",
              device);
}

// Counts a call that ends a graph's capture, unless its thread has relaxed its mode.
bool breaks_capture() {
  if (world().is_capturing && !is_relaxed) {
    world().counts[kCaptureBreaks]++;
    return true;
  }
  return false;
}

LateStream* stream_of(const c10::Stream& stream) {
  return world().streams[stream.device_index()].at(stream.id()).get();
}

LateStream* current_stream(int device) {
  return world().streams[device].at(current_streams[device]).get();
}

void put(LateStream* stream, std::function<void()> run, std::shared_ptr<Position> awaits = {}) {
  stream->operations.push_back({std::move(run), std::move(awaits)});
  stream->put++;
}

// Runs the operations that a position waits for, and no others.
void run_up_to(Lock& lock, const Position& position) {
  World& all = world();
  while (all.is_held && !position.is_over()) {
    all.counts[kWaiting]++;
    all.changed.wait(lock);
    all.counts[kWaiting]--;
  }
  LateStream* stream = position.stream;
  while (!position.is_over()) {
    if (auto awaits = stream->operations.front().awaits) {
      run_up_to(lock, *awaits);
      if (position.is_over()) {
        return;  // held back meanwhile, and done by another thread
      }
    }
    Operation operation = std::move(stream->operations.front());
    stream->operations.pop_front();
    if (operation.run && !all.has_failed[stream->device]) {
      operation.run();
    }
    stream->done++;
  }
}

void finish(Lock& lock, LateStream* stream) {
  run_up_to(lock, Position{stream, stream->put});
  check(stream->device);
}

// Memory ------------------------------------------------------------------------------------

void take_freed() {
  auto& freed = world().freed;
  std::vector<Freed> waiting;
  for (auto& one : freed) {
    bool is_over = true;
    for (auto& position : one.awaits) {
      is_over = is_over && position.is_over();
    }
    if (is_over) {
      world().counts[kUsedBytes] -= one.block->nbytes;
      world().free[{one.block->stream, one.block->nbytes}].push_back(one.block);
    } else {
      waiting.push_back(std::move(one));
    }
  }
  freed = std::move(waiting);
}

void free_block(void* context) {
  Lock lock(world().mutex);
  auto* block = static_cast<Block*>(context);
  Freed freed{block, {}};
  for (LateStream* stream : block->used_by) {
    freed.awaits.push_back({stream, stream->put});
  }
  block->used_by.clear();
  world().freed.push_back(std::move(freed));
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock(world().mutex);
    World& all = world();
    c10::Device device(kLate, current_device);
    check(current_device);
    if (nbytes == 0) {
      return {nullptr, nullptr, &free_nothing, device};
    }
    take_freed();
    all.counts[kAllocations]++;
    nbytes = (nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    LateStream* stream = current_stream(current_device);
    auto& free = all.free[{stream, nbytes}];
    Block* block;
    if (free.empty()) {
      block = new Block{static_cast<char*>(std::aligned_alloc(kBlockBytes, nbytes)), nbytes, stream};
      std::memset(block->memory, 0xA5, nbytes);
      all.counts[kNewBlocks]++;
      all.counts[kReservedBytes] += nbytes;
    } else {
      block = free.back();
      free.pop_back();
    }
    auto& used = all.counts[kUsedBytes];
    used += nbytes;
    all.counts[kMostUsedBytes] = std::max(all.counts[kMostUsedBytes], used);
    return {block->memory, block, &free_block, device};
  }
  static void free_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

DeviceMemory device_memory;

// torch's own allocator of pinned memory, as CUDA and XPU use it.
struct PinnedMemory final : at::CachingHostAllocatorImpl<c10::Stream, Position> {
  bool pinned_use_background_threads() override {
    return false;
  }

 private:
  void allocate_host_memory(size_t nbytes, void** pointer) override {
    Lock lock(world().mutex);
    check(current_device);
    breaks_capture();
    *pointer = std::aligned_alloc(kPage, (nbytes + kPage - 1) / kPage * kPage);
    world().pinned[reinterpret_cast<uintptr_t>(*pointer)] = nbytes;
    world().counts[kHostBlocks]++;
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    Lock lock(world().mutex);
    world().pinned.erase(reinterpret_cast<uintptr_t>(block->ptr_));
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<Position>>& events, c10::Stream stream) override {
    Lock lock(world().mutex);
    LateStream* late = stream_of(stream);
    events->push_back({late, late->put});
  }
  bool query_event(Position& event) override {
    Lock lock(world().mutex);
    return event.is_over();
  }
  // These two are virtual since torch 2.11 or a little before.
  c10::Stream get_current_stream() const {
    c10::Device device(kLate, current_device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[current_device]);
  }
  bool stream_is_capturing(c10::Stream) const {
    return false;
  }
};

DECLARE_HOST_ALLOCATOR(HostMemory, PinnedMemory, free_pinned, host_memory)

template <class Ranges>
bool holds(const Ranges& ranges, uintptr_t address, size_t nbytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) {
    return false;
  }
  auto range = std::prev(after);
  return address + nbytes <= range->first + range->second;
}

Registration* registration_of(uintptr_t address, size_t nbytes, uintptr_t* start) {
  auto& registered = world().registered;
  auto after = registered.upper_bound(address);
  if (after == registered.begin()) {
    return nullptr;
  }
  auto found = std::prev(after);
  if (address + nbytes > found->first + found->second.nbytes) {
    return nullptr;
  }
  *start = found->first;
  return &found->second;
}

// Page locks --------------------------------------------------------------------------------

void hold_pages(uintptr_t address, Registration& registration) {
  size_t page_count = (registration.nbytes + kPage - 1) / kPage;
  std::vector<iovec> pages;
  while (registration.pages_held < page_count) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      return;  // what is left is read as it is
    }
    if (fcntl(ends[1], F_SETPIPE_SZ, kPipePages * kPage) < 0) {
      close(ends[0]);
      close(ends[1]);
      return;
    }
    size_t count = std::min(kPipePages, page_count - registration.pages_held);
    pages.clear();
    for (size_t page = 0; page < count; ++page) {
      uintptr_t at = address + (registration.pages_held + page) * kPage;
      pages.push_back({reinterpret_cast<void*>(at), kPage});
    }
    registration.pipes.push_back({ends[0], ends[1]});
    ssize_t held = vmsplice(ends[1], pages.data(), pages.size(), 0);
    if (held != static_cast<ssize_t>(count * kPage)) {
      return;
    }
    registration.pages_held += count;
  }
}

void drop_pages(Registration& registration) {
  for (auto& [reader, writer] : registration.pipes) {
    close(reader);
    close(writer);
  }
  registration.pipes.clear();
}

// Reads registered memory by the pages that were registered.
bool read_pages(uintptr_t start, const Registration& registration, uintptr_t source, char* target,
                size_t nbytes) {
  std::vector<char> content(kPipePages * kPage);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return false;
  }
  bool is_right = fcntl(ends[1], F_SETPIPE_SZ, kPipePages * kPage) >= 0;
  size_t offset = source - start;
  for (size_t done = 0; is_right && done < nbytes;) {
    size_t chunk = (offset + done) / (kPipePages * kPage);
    size_t within = (offset + done) % (kPipePages * kPage);
    if (chunk >= registration.pipes.size()) {
      is_right = false;
      break;
    }
    ssize_t there = tee(registration.pipes[chunk].first, ends[1], kPipePages * kPage, 0);
    size_t taken = 0;
    while (there > 0 && taken < static_cast<size_t>(there)) {
      ssize_t some = read(ends[0], content.data() + taken, there - taken);
      if (some <= 0) {
        break;
      }
      taken += some;
    }
    size_t count = std::min(nbytes - done, kPipePages * kPage - within);
    if (taken < within + count) {
      is_right = false;
      break;
    }
    std::memcpy(target + done, content.data() + within, count);
    done += count;
  }
  close(ends[0]);
  close(ends[1]);
  return is_right;
}

// Done by a stream: reads pinned or registered memory, as it is by now.
void read_late(uintptr_t source, char* target, size_t nbytes, bool was_registered) {
  if (!was_registered) {
    std::memcpy(target, reinterpret_cast<void*>(source), nbytes);
    return;
  }
  uintptr_t start = 0;
  Registration* registration = registration_of(source, nbytes, &start);
  if (registration == nullptr) {
    world().counts[kFaults]++;
    std::memset(target, 0xDB, nbytes);
    return;
  }
  if (source + nbytes > start + registration->pages_held * kPage ||
      !read_pages(start, *registration, source, target, nbytes)) {
    std::memcpy(target, reinterpret_cast<void*>(source), nbytes);
  }
}

// Streams and events ------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kLate;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kLate, current_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kLate, static_cast<c10::DeviceIndex>(current_device)};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= -1 && device.index() < kDevices, "there is no ", device);
    if (device.index() >= 0) {
      // Selected before, it binds no context: so did torch 2.6 and 2.7 on CUDA.
      has_context = has_context || device.index() != current_device;
      current_device = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    Lock lock(world().mutex);
    world().counts[kStreamLookups]++;
    int index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, {kLate, static_cast<c10::DeviceIndex>(index)},
                       current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(world().mutex);
    int index = device.has_index() ? device.index() : current_device;
    check(index);
    auto& streams = world().streams[index];
    streams.push_back(std::make_unique<LateStream>(LateStream{index}));
    world().counts[kNewStreams]++;
    return c10::Stream(c10::Stream::UNSAFE, {kLate, static_cast<c10::DeviceIndex>(index)},
                       static_cast<c10::StreamId>(streams.size() - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int index = stream.device_index();
    c10::Stream before(c10::Stream::UNSAFE, stream.device(), current_streams[index]);
    current_streams[index] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Position*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock(world().mutex);
    check(stream.device_index());
    if (*event == nullptr) {
      *event = new Position();
      world().counts[kEvents]++;
    }
    LateStream* late = stream_of(stream);
    *static_cast<Position*>(*event) = {late, late->put};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    check(stream.device_index());
    world().counts[kStreamWaits]++;
    if (event != nullptr) {
      auto position = std::make_shared<Position>(*static_cast<Position*>(event));
      if (position->stream != stream_of(stream)) {
        put(stream_of(stream), {}, position);
      }
    }
  }
  bool queryEvent(void* event) const override {
    Lock lock(world().mutex);
    breaks_capture();
    auto* position = static_cast<Position*>(event);
    if (position == nullptr || position->stream == nullptr) {
      return true;
    }
    check(position->stream->device);
    return position->is_over();
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(world().mutex);
    breaks_capture();
    world().counts[kEventWaits]++;
    auto* position = static_cast<Position*>(event);
    if (position != nullptr && position->stream != nullptr) {
      Position where = *position;
      run_up_to(lock, where);
      check(where.stream->device);
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    check(stream.device_index());
    return stream_of(stream)->operations.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    breaks_capture();
    world().counts[kSynchronizations]++;
    finish(lock, stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(world().mutex);
    breaks_capture();
    world().counts[kSynchronizations]++;
    for (size_t number = 0; number < world().streams[device].size(); ++number) {
      finish(lock, world().streams[device][number].get());
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(world().mutex);
    check(stream.device_index());
    world().counts[kRecordedStreams]++;
    auto* block = static_cast<Block*>(data.get_context());
    if (block != nullptr && block->stream != stream_of(stream)) {
      block->used_by.insert(stream_of(stream));
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return world().is_on ? kDevices : 0;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return world().is_on;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return world().is_initialized;
  }
  c10::DeviceIndex deviceCount() const override {
    return world().is_on ? kDevices : 0;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kLate, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kLate, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(world().mutex);
    auto address = reinterpret_cast<uintptr_t>(data);
    uintptr_t start;
    return holds(world().pinned, address, 1) || registration_of(address, 1, &start) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &host_memory;
  }
};

// Operators ---------------------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(kLate)));
  return at::detail::empty_generic(sizes, &device_memory, kKeys,
                                   dtype.value_or(at::ScalarType::Float), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(kLate)));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, kKeys,
                                           dtype.value_or(at::ScalarType::Float));
}

const at::Tensor& resize_late(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  auto* data = self.unsafeGetTensorImpl();
  data->generic_set_sizes_contiguous(sizes);
  size_t nbytes = self.numel() * self.itemsize();
  if (self.storage().nbytes() < nbytes) {
    c10::DeviceGuard guard(self.device());
    self.storage().set_data_ptr_noswap(device_memory.allocate(nbytes));
    self.storage().set_nbytes(nbytes);
  }
  return self;
}

// The memory of a tensor of the device, as the host sees it.
at::Tensor on_host(char* memory, at::IntArrayRef sizes, at::IntArrayRef strides,
                   at::ScalarType dtype) {
  return at::from_blob(memory, sizes, strides, at::TensorOptions().dtype(dtype));
}

// A function that does the copy of a tensor's elements when it is called, by addresses alone.
std::function<void()> mover(const at::Tensor& target, const at::Tensor& source) {
  auto* to = static_cast<char*>(target.data_ptr());
  auto* from = static_cast<char*>(source.data_ptr());
  if (target.scalar_type() == source.scalar_type() && target.is_contiguous() &&
      source.is_contiguous()) {
    size_t nbytes = target.nbytes();
    return [=] { std::memmove(to, from, nbytes); };
  }
  auto sizes = target.sizes().vec();
  auto to_strides = target.strides().vec(), from_strides = source.strides().vec();
  auto to_dtype = target.scalar_type(), from_dtype = source.scalar_type();
  return [=] {
    at::AutoDispatchBelowADInplaceOrView guard;
    on_host(to, sizes, to_strides, to_dtype)
        .copy_(on_host(from, sizes, from_strides, from_dtype));
  };
}

void note_copy(Lock&, int device) {
  World& all = world();
  if (all.copies_left[device] == 0) {
    all.has_failed[device] = true;
  } else if (all.copies_left[device] > 0) {
    all.copies_left[device]--;
  }
  check(device);
}

void copy_to_device(const at::Tensor& target, const at::Tensor& given, bool non_blocking) {
  bool is_alike = target.strides() == given.strides() && target.is_non_overlapping_and_dense() &&
      target.scalar_type() == given.scalar_type();
  if (!is_alike && !target.is_contiguous()) {
    at::Tensor whole = at::empty(target.sizes(), target.options());
    copy_to_device(whole, given, non_blocking);
    target.copy_(whole);
    return;
  }
  at::Tensor source = is_alike ? given : given.to(target.scalar_type()).contiguous();
  auto address = reinterpret_cast<uintptr_t>(source.data_ptr());
  auto* to = static_cast<char*>(target.data_ptr());
  size_t nbytes = source.nbytes();
  int device = target.get_device();
  bool was_pinned = false;
  {
    Lock lock(world().mutex);
    note_copy(lock, device);
    LateStream* stream = current_stream(device);
    uintptr_t start;
    bool was_registered = registration_of(address, nbytes, &start) != nullptr;
    was_pinned = holds(world().pinned, address, nbytes);
    if (was_registered || was_pinned) {
      world().counts[kLateCopies]++;
      put(stream, [=] { read_late(address, to, nbytes, was_registered); });
    } else {
      world().counts[kPageableCopies]++;
      auto* bytes = reinterpret_cast<char*>(address);
      auto staged = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
      put(stream, [=] { std::memcpy(to, staged->data(), nbytes); });
    }
    if (!non_blocking) {
      finish(lock, stream);
    }
  }
  if (was_pinned && non_blocking) {
    c10::Device where(kLate, static_cast<c10::DeviceIndex>(device));
    c10::Stream stream(c10::Stream::UNSAFE, where, current_streams[device]);
    host_memory.record_event(source.storage().mutable_data(),
                             source.storage().data_ptr().get_context(), stream);
  }
}

void copy_to_host(const at::Tensor& target, const at::Tensor& source) {
  Lock lock(world().mutex);
  int device = source.get_device();
  note_copy(lock, device);
  world().counts[kHostCopies]++;
  finish(lock, current_stream(device));
  lock.unlock();
  mover(target, source)();
}

at::Tensor copy_from(const at::Tensor& given, const at::Tensor& target, bool non_blocking) {
  at::Tensor source = given.sizes() == target.sizes() ? given : given.expand(target.sizes());
  if (target.numel() == 0) {
    return target;
  }
  TORCH_CHECK(source.layout() == at::kStrided, "the late device takes strided tensors");
  if (source.is_cpu()) {
    copy_to_device(target, source.resolve_conj().resolve_neg(), non_blocking);
  } else if (target.is_cpu()) {
    copy_to_host(target, source);
  } else {
    Lock lock(world().mutex);
    note_copy(lock, target.get_device());
    world().counts[kDeviceCopies]++;
    LateStream* from = current_stream(source.get_device());
    LateStream* to = current_stream(target.get_device());
    if (from != to) {
      put(from, {}, std::make_shared<Position>(Position{to, to->put}));
    }
    put(from, mover(target, source));
    if (from != to) {
      put(to, {}, std::make_shared<Position>(Position{from, from->put}));
    }
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize_late(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  return self.cpu().item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return at::cpu::view(self, sizes);
}
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, sizes, strides, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::_reshape_alias(self, sizes, strides);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_late);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

// For ctypes --------------------------------------------------------------------------------

extern "C" {

void late_load() {
  pthread_atfork(
      [] {
        int inside = loader_threads_inside;
        world().mutex.lock();
        world().counts[kForksInside] += inside > 0;
      },
      [] { world().mutex.unlock(); }, [] { world().mutex.unlock(); });
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kLate, &device_memory);
  at::setHostAllocator(kLate, &host_memory);
}

// Switch it on, as new, or off.
void late_switch(int is_on) {
  Lock lock(world().mutex);
  World& all = world();
  all.is_on = is_on;
  all.is_held = all.is_capturing = false;
  for (int device = 0; device < kDevices; ++device) {
    all.copies_left[device] = -1;
    all.has_failed[device] = false;
    for (auto& stream : all.streams[device]) {
      stream->operations.clear();
      stream->done = stream->put;
    }
  }
  take_freed();
  for (auto& [kind, blocks] : all.free) {
    for (Block* block : blocks) {
      all.counts[kReservedBytes] -= block->nbytes;
      std::free(block->memory);
      delete block;
    }
  }
  all.free.clear();
  for (auto& [address, registration] : all.registered) {
    drop_pages(registration);
  }
  all.registered.clear();
  auto reserved = all.counts[kReservedBytes], used = all.counts[kUsedBytes];
  auto waiting = all.counts[kWaiting];
  std::fill(all.counts, all.counts + kCounters, 0);
  all.counts[kReservedBytes] = reserved;
  all.counts[kUsedBytes] = all.counts[kMostUsedBytes] = used;
  all.counts[kWaiting] = waiting;
  all.is_initialized = false;  // after its count: another thread may use the device meanwhile
  all.changed.notify_all();
}

int64_t late_count(int counter) {
  Lock lock(world().mutex);
  take_freed();
  return world().counts[counter];
}

void late_hold(int is_held) {
  Lock lock(world().mutex);
  world().is_held = is_held;
  world().changed.notify_all();
}

void late_stay(int microseconds) {
  Lock lock(world().mutex);
  usleep(microseconds);
}

void late_fail_after(int device, int64_t copies) {
  Lock lock(world().mutex);
  world().copies_left[device] = copies;
  world().has_failed[device] = copies < 0;
}

void late_capture(int is_capturing) {
  Lock lock(world().mutex);
  world().is_capturing = is_capturing;
}

int late_is_initialized() {
  return world().is_initialized;
}

// Work that is not done yet, on all streams.
int64_t late_unfinished() {
  Lock lock(world().mutex);
  int64_t count = 0;
  for (auto& streams : world().streams) {
    for (auto& stream : streams) {
      count += stream->operations.size();
    }
  }
  return count;
}

int late_has_context() {
  return has_context;
}


// The driver: 0, or an error's number.

int late_register(uintptr_t address, size_t nbytes) {
  Lock lock(world().mutex);
  World& all = world();
  if (breaks_capture()) {
    return 900;
  }
  if (!has_context) {
    return 201;
  }
  if (all.has_failed[current_device]) {
    return 700;
  }
  uintptr_t start;
  if (all.registered.count(address) || registration_of(address, 1, &start) != nullptr) {
    return 712;
  }
  Registration& registration = all.registered[address];
  registration.nbytes = nbytes;
  hold_pages(address, registration);
  all.counts[kRegistered]++;
  auto& bytes = all.counts[kRegisteredBytes];
  bytes += nbytes;
  all.counts[kMostRegisteredBytes] = std::max(all.counts[kMostRegisteredBytes], bytes);
  return 0;
}

int late_unregister(uintptr_t address) {
  Lock lock(world().mutex);
  World& all = world();
  if (!all.is_on) {
    return 0;  // all was dropped when it was switched off; what is garbage may come later
  }
  if (breaks_capture()) {
    return 900;
  }
  if (all.has_failed[current_device]) {
    return 700;  // an error belongs to the context of its device
  }
  auto found = all.registered.find(address);
  if (found == all.registered.end()) {
    return 713;
  }
  drop_pages(found->second);
  all.counts[kUnregistered]++;
  all.counts[kRegisteredBytes] -= found->second.nbytes;
  all.registered.erase(found);
  return 0;
}

int64_t late_registered_bytes(uintptr_t address) {
  Lock lock(world().mutex);
  auto found = world().registered.find(address);
  return found == world().registered.end() ? 0 : found->second.nbytes;
}

int late_relax(int relaxed) {
  int before = is_relaxed;
  is_relaxed = relaxed;
  return before;
}

}  // extern "C"
