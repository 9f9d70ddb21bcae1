#include "fireflyer/collectives/group/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "fireflyer/base/placement.hpp"

namespace ff {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

[[noreturn]] void raise(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// A memory file, as one process has mapped it. A forked child has its parent's objects, but not their mappings.
using Identity = std::tuple<pid_t, dev_t, ino_t>;

struct Mapped {
  std::mutex mutex;
  std::map<Identity, std::weak_ptr<Arena>> arenas;
};

Mapped& mapped() {
  static Mapped all;
  return all;
}

}  // namespace

std::shared_ptr<Arena> Arena::shared(int fd) {
#if defined(__SANITIZE_THREAD__)
  // Ranks that are threads of a test map the window, by which they wait for each other, each at its own addresses, and the
  // thread sanitizer knows memory by its address only: in an arena mapped once it would see writes, but not the waiting.
  return std::make_shared<Arena>(fd);
#else
  struct stat info{};
  if (fstat(fd, &info) != 0) raise("cannot examine an arena");
  Mapped& all = mapped();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.arenas, [](const auto& entry) { return entry.second.expired(); });  // its number may be another file's by now
  std::weak_ptr<Arena>& known = all.arenas[{getpid(), info.st_dev, info.st_ino}];
  std::shared_ptr<Arena> arena = known.lock();
  if (!arena) known = arena = std::make_shared<Arena>(fd);
  return arena;
#endif
}

int Arena::create(std::size_t bytes) {
  const int fd = memfd_create("fireflyer-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) raise("cannot create shared memory");
  if (ftruncate(fd, static_cast<off_t>(round_up(std::max<std::size_t>(bytes, 1), huge_page))) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    raise("cannot size shared memory");
  }
  return fd;
}

Arena::Arena(int fd) : maker_(getpid()) {
  struct stat info{};
  if (fstat(fd, &info) != 0) raise("cannot examine an arena");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw std::runtime_error("an arena that can shrink under its readers is refused");
  bytes_ = static_cast<std::size_t>(info.st_size);
  void* map = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (map == MAP_FAILED) raise("cannot map an arena");
  base_ = static_cast<char*>(map);
  madvise(map, bytes_, MADV_HUGEPAGE);  // advice: where the system refuses, small pages serve
  // A forked child, such as a data loader's worker, must neither keep gradients alive nor write into them. WIPEONFORK, by
  // which it would at least keep the addresses, is for private memory only: the child may put something else there.
  madvise(map, bytes_, MADV_DONTFORK);
  free_[0] = bytes_;
}

Arena::~Arena() {
  if (mapped_here()) munmap(base_, bytes_);  // in a forked child: what it has put at these addresses, a thread's stack say
}

bool Arena::mapped_here() const { return getpid() == maker_; }

std::string Arena::prefer_node(int node) { return ff::prefer_node(base_, bytes_, node); }

bool Arena::holds(const void* address, std::size_t bytes) const {
  const auto* at = static_cast<const char*>(address);
  return at >= base_ && bytes <= bytes_ && static_cast<std::size_t>(at - base_) <= bytes_ - bytes;
}

char* Arena::at(std::uint64_t start, std::uint64_t offset, std::size_t bytes) const {
  if (start > bytes_ || offset > bytes_ - start || bytes > bytes_ - start - offset) return nullptr;
  return base_ + start + offset;
}

char* Arena::allocate(std::size_t bytes) {
  if (!mapped_here()) throw std::runtime_error("an arena is not mapped in a forked child; make a group in the child");
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1), bytes >= huge_page ? huge_page : arena_align);
  const std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, room] = *it;
    const std::size_t start = round_up(offset, bytes >= huge_page ? huge_page : arena_align);
    if (start + wanted > offset + room) continue;
    free_.erase(it);
    if (start > offset) free_[offset] = start - offset;
    if (start + wanted < offset + room) free_[start + wanted] = offset + room - start - wanted;
    taken_[start] = wanted;
    return base_ + start;
  }
  throw std::bad_alloc();
}

void Arena::release(char* address) {
  if (!mapped_here()) return;  // nor may the child take a lock that another thread had when it was forked
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(static_cast<std::size_t>(address - base_));
  if (found == taken_.end()) return;
  auto [offset, bytes] = *found;
  taken_.erase(found);
  madvise(base_ + offset, bytes, MADV_REMOVE);
  const auto next = free_.find(offset + bytes);
  if (next != free_.end()) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

std::size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [offset, bytes] : taken_) sum += bytes;
  return sum;
}

}  // namespace ff
