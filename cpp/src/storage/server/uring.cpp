#include "uring.hpp"

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "fireflyer/base/clock.hpp"

namespace ff {
namespace {

constexpr std::uint64_t nobodys_tag = UINT64_MAX;  // of a cancellation

// Reads and cancellations.
bool knows_operations(int fd) {
  std::vector<std::byte> memory(sizeof(io_uring_probe) + IORING_OP_LAST * sizeof(io_uring_probe_op));
  auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
  if (::syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, probe, static_cast<unsigned>(IORING_OP_LAST)) < 0) return false;
  const auto knows = [&](int operation) { return operation <= probe->last_op && (probe->ops[operation].flags & IO_URING_OP_SUPPORTED) != 0; };
  return knows(IORING_OP_READ) && knows(IORING_OP_ASYNC_CANCEL);
}

void* mapped(int fd, std::size_t bytes, std::uint64_t what) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(what));
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

// What the kernel and this process share.
struct Uring::Map {
  io_uring_params params{};
  std::byte* rings = nullptr;
  io_uring_sqe* entries = nullptr;

  std::size_t rings_bytes() const {
    return std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned), params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  }
  std::size_t entries_bytes() const { return params.sq_entries * sizeof(io_uring_sqe); }
  unsigned& word(unsigned offset) const { return *reinterpret_cast<unsigned*>(rings + offset); }
  unsigned& array(unsigned i) const { return reinterpret_cast<unsigned*>(rings + params.sq_off.array)[i]; }
  const io_uring_cqe& result(unsigned i) const { return reinterpret_cast<const io_uring_cqe*>(rings + params.cq_off.cqes)[i]; }

  ~Map() {
    if (rings != nullptr) ::munmap(rings, rings_bytes());
    if (entries != nullptr) ::munmap(entries, entries_bytes());
  }
};

Uring::Uring(int fd, std::unique_ptr<Map> map) : fd_(fd), map_(std::move(map)) {}

Uring::~Uring() {
  map_.reset();
  ::close(fd_);
}

std::unique_ptr<Uring> Uring::open(unsigned entries) {
  auto map = std::make_unique<Map>();
  map->params.flags = IORING_SETUP_CLAMP;
  const int fd = static_cast<int>(::syscall(SYS_io_uring_setup, entries, &map->params));
  if (fd < 0) return nullptr;
  constexpr unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
  const bool fits = (map->params.features & needed) == needed && knows_operations(fd);
  if (fits) {
    map->rings = static_cast<std::byte*>(mapped(fd, map->rings_bytes(), IORING_OFF_SQ_RING));
    map->entries = static_cast<io_uring_sqe*>(mapped(fd, map->entries_bytes(), IORING_OFF_SQES));
  }
  if (map->rings == nullptr || map->entries == nullptr) {
    map.reset();
    ::close(fd);
    return nullptr;
  }
  return std::unique_ptr<Uring>(new Uring(fd, std::move(map)));
}

long Uring::enter(unsigned submitted, unsigned flags) const {
  for (;;) {
    const long n = ::syscall(SYS_io_uring_enter, fd_, submitted, 0u, flags, nullptr, std::size_t{0});
    if (n >= 0 || errno != EINTR) return n;
  }
}

// Behind what is queued; the kernel sees it when `submit` says so. Null: there is no room.
void* Uring::next_entry() {
  Map& map = *map_;
  const unsigned tail = map.word(map.params.sq_off.tail), head = std::atomic_ref(map.word(map.params.sq_off.head)).load(std::memory_order_acquire);
  if (tail - head >= map.params.sq_entries) return nullptr;
  const unsigned place = tail & map.word(map.params.sq_off.ring_mask);
  map.array(place) = place;
  std::memset(&map.entries[place], 0, sizeof(io_uring_sqe));
  ++queued_;
  return &map.entries[place];
}

bool Uring::read(int file, std::uint64_t offset, MutableBytes into, std::uint64_t tag) {
  auto* const entry = static_cast<io_uring_sqe*>(next_entry());
  if (entry == nullptr) return false;
  entry->opcode = IORING_OP_READ;
  entry->fd = file;
  entry->off = offset;
  entry->addr = reinterpret_cast<std::uint64_t>(into.data());
  entry->len = static_cast<unsigned>(into.size());
  entry->user_data = tag;
  unsigned& tail = map_->word(map_->params.sq_off.tail);
  std::atomic_ref(tail).store(tail + 1, std::memory_order_release);
  return true;
}

void Uring::cancel_all() {
  auto* const entry = static_cast<io_uring_sqe*>(next_entry());
  if (entry == nullptr) return;
  entry->opcode = IORING_OP_ASYNC_CANCEL;
  entry->fd = -1;
  entry->cancel_flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
  entry->user_data = nobodys_tag;
  unsigned& tail = map_->word(map_->params.sq_off.tail);
  std::atomic_ref(tail).store(tail + 1, std::memory_order_release);
}

void Uring::submit() {
  while (queued_ > 0) {
    const long n = enter(queued_, 0);
    if (n <= 0) return;  // EAGAIN, EBUSY: results have to be taken first
    queued_ -= static_cast<unsigned>(n);
  }
}

void Uring::take(const std::function<void(std::uint64_t tag, int result)>& each) {
  Map& map = *map_;
  const unsigned mask = map.word(map.params.cq_off.ring_mask);
  for (;;) {
    unsigned& head = map.word(map.params.cq_off.head);
    if (head == std::atomic_ref(map.word(map.params.cq_off.tail)).load(std::memory_order_acquire)) {
      // Results that did not fit stay with the kernel until they are asked for, and the descriptor readable.
      const bool more = (std::atomic_ref(map.word(map.params.sq_off.flags)).load(std::memory_order_acquire) & IORING_SQ_CQ_OVERFLOW) != 0;
      if (!more || enter(0, IORING_ENTER_GETEVENTS) < 0) break;
      continue;
    }
    const io_uring_cqe result = map.result(head & mask);
    std::atomic_ref(head).store(head + 1, std::memory_order_release);
    if (result.user_data != nobodys_tag) each(result.user_data, result.res);
  }
  submit();
}

bool Uring::wait(int timeout_ms) const {
  pollfd one{fd_, POLLIN, 0};
  const std::int64_t deadline_ns = monotonic_ns() + std::int64_t{timeout_ms} * 1'000'000;
  for (;;) {
    const std::int64_t left_ns = std::max<std::int64_t>(0, deadline_ns - monotonic_ns());
    const int ready = ::poll(&one, 1, static_cast<int>((left_ns + 999'999) / 1'000'000));
    if (ready >= 0 || errno != EINTR) return ready > 0;  // what the kernel does in this thread for a read interrupts it
  }
}

}  // namespace ff
