#include "fireflyer/collectives/group/peer_memory.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <map>
#include <mutex>
#include <stdexcept>

namespace ff {
namespace {

#ifdef SYS_pidfd_open
constexpr long pidfd_open_call = SYS_pidfd_open;
#else
constexpr long pidfd_open_call = 434;  // on every architecture
#endif

struct Holders {
  std::mutex mutex;
  pid_t process = 0;
  int count = 0;
};

Holders& holders() {
  static Holders all;
  return all;
}

void permit(bool everyone) {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, everyone ? PR_SET_PTRACER_ANY : 0UL, 0, 0, 0);  // fails where there is no Yama: then it is not needed
#else
  static_cast<void>(everyone);
#endif
}

// Written by others when they look whether they may: [0] holds the number, [1] is theirs to write.
std::array<std::uint64_t, 2> probe_words{};

using Copy = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

int copy_all(Copy copy, pid_t pid, char* mine, std::uint64_t theirs, std::size_t bytes) {
  std::size_t done = 0;
  while (done < bytes) {  // less than all is copied where a later page is missing: the next call says why
    const iovec local{mine + done, bytes - done};
    const iovec remote{reinterpret_cast<void*>(theirs + done), bytes - done};  // NOLINT: an address of another process
    const ssize_t moved = copy(pid, &local, 1, &remote, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    done += static_cast<std::size_t>(moved);
  }
  return 0;
}

}  // namespace

OpenMemory::OpenMemory() : owner_(getpid()) {
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  if (all.process != owner_) all.count = 0;  // a forked child inherits the number, but not the permission
  all.process = owner_;
  if (all.count++ == 0) permit(true);
}

void OpenMemory::close() {
  if (owner_ != getpid()) return;
  owner_ = 0;
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  if (--all.count == 0) permit(false);
}

MemoryProbe memory_probe() {
  static const std::uint64_t number = [] {
    std::uint64_t random = 0;
    if (getentropy(&random, sizeof random) != 0) throw std::runtime_error("the system gives no random numbers");
    return random;
  }();
  probe_words[0] = number;
  return MemoryProbe{static_cast<std::uint64_t>(getpid()), reinterpret_cast<std::uint64_t>(probe_words.data()), number};
}

bool can_access(const MemoryProbe& of) {
  std::uint64_t found = 0;
  const auto pid = static_cast<pid_t>(of.pid);
  return read_memory(pid, &found, of.address, sizeof found) == 0 && found == of.number && write_memory(pid, of.address + sizeof found, &found, sizeof found) == 0;
}

Process::Process(pid_t pid) : fd_(static_cast<int>(syscall(pidfd_open_call, pid, 0))) {}

Process::~Process() {
  if (fd_ >= 0) ::close(fd_);
}

std::shared_ptr<const Process> Process::met(pid_t pid) {
  static std::mutex mutex;
  static std::map<pid_t, std::weak_ptr<const Process>> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const Process>& known = all[pid];
  std::shared_ptr<const Process> process = known.lock();
  if (!process || process->ended()) known = process = std::make_shared<const Process>(pid);
  return process;
}

bool Process::ended() const {
  pollfd entry{fd_, POLLIN, 0};  // poll passes over a descriptor of -1
  return poll(&entry, 1, 0) > 0 && entry.revents != 0;
}

int read_memory(pid_t pid, void* to, std::uint64_t address, std::size_t bytes) { return copy_all(process_vm_readv, pid, static_cast<char*>(to), address, bytes); }

int write_memory(pid_t pid, std::uint64_t address, const void* from, std::size_t bytes) {
  return copy_all(process_vm_writev, pid, static_cast<char*>(const_cast<void*>(from)), address, bytes);
}

}  // namespace ff
