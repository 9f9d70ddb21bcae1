// A file system of FUSE: threads that receive what the kernel asks. Reads and writes of files that were opened with a
// descriptor are answered here; everything else becomes an event, and is answered by its number, by any thread.
//
// An inode's number is its node in the kernel too, and is never used for another one: so nothing is counted, and what
// the kernel forgets is nothing to us.
#pragma once

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "fireflyer/fuse/memory.hpp"

namespace ff {

inline constexpr std::size_t max_transfer_bytes = std::size_t{1} << 20;  // of one read or write
inline constexpr std::size_t max_caller_groups = 64;
// Of reads that have memory. Who answers divides it: see `fs.mount.read_memory`.
inline constexpr std::size_t max_read_bytes = std::size_t{96} << 20;

struct Caller {
  std::uint32_t uid = 0, gid = 0, pid = 0;
  std::vector<std::uint32_t> groups;
};

using FuseArgument = std::variant<std::int64_t, std::uint64_t, std::string, Memory>;

// `number`: to be answered with; 0: nothing to answer.
struct FuseEvent {
  std::uint64_t number = 0;
  const char* kind = "";
  std::uint64_t inode = 0;
  Caller caller;
  std::vector<FuseArgument> arguments;
};

class FuseEvents {
 public:
  FuseEvents();
  ~FuseEvents();
  FuseEvents(const FuseEvents&) = delete;
  FuseEvents& operator=(const FuseEvents&) = delete;

  int descriptor() const { return descriptor_; }
  void put(FuseEvent event);
  std::vector<FuseEvent> take(std::size_t limit);

 private:
  int descriptor_;
  std::mutex mutex_;
  std::deque<FuseEvent> events_;
};

// A descriptor that reads and writes of one open file are natively carried out on.
class LocalFile {
 public:
  explicit LocalFile(int fd) : fd_(fd) {}
  ~LocalFile();
  LocalFile(const LocalFile&) = delete;
  LocalFile& operator=(const LocalFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Since it was mounted. Each is one addition where it happens; who asks reads them all, not of one instant.
struct FuseCounts {
  static constexpr std::size_t opcodes = 64, errnos = 134;  // what is larger is counted in the first place
  std::array<std::atomic<std::uint64_t>, opcodes> requests{};  // by the kernel's numbers (operations.cpp has the names)
  std::array<std::atomic<std::uint64_t>, errnos> errors{};
  std::atomic<std::uint64_t> read_bytes = 0, written_bytes = 0;

  void requested(std::size_t opcode) { requests[opcode < opcodes ? opcode : 0].fetch_add(1, std::memory_order_relaxed); }
  void refused(int error) { errors[error > 0 && error < static_cast<int>(errnos) ? static_cast<std::size_t>(error) : 0].fetch_add(1, std::memory_order_relaxed); }
  void read(std::size_t bytes) { read_bytes.fetch_add(bytes, std::memory_order_relaxed); }
  void written(std::size_t bytes) { written_bytes.fetch_add(bytes, std::memory_order_relaxed); }
};

class FuseSession {
 public:
  // Mounted when it returns. `options`: as of -o. Throws std::runtime_error with what libfuse says.
  FuseSession(const std::string& directory, const std::vector<std::string>& options);
  ~FuseSession();
  FuseSession(const FuseSession&) = delete;
  FuseSession& operator=(const FuseSession&) = delete;

  void start(int threads);
  // No more requests are received; those that were can still be answered. Whoever asks meanwhile waits.
  void stop();
  // Stops, and answers what is open with an error. `unmount`: libfuse detaches what is on the place, whosoever that is.
  // Idempotent.
  void end(bool unmount);
  // Ends it, if that was not done. Nobody may be answering. Idempotent.
  void close();

  FuseEvents& events() { return events_; }
  FuseCounts& counts() { return counts_; }
  // For what is read.
  MemoryPool& pool() { return *pool_; }
  // The same for who answers: none while there is no room. There is an event then, "room", when some was given back.
  std::optional<Memory> read_memory(std::size_t size);

  struct Asked {
    fuse_req_t request = nullptr;
    std::size_t size = 0;  // that the answer may have
    std::uint64_t handle = 0;
  };
  // Who has the request answers it. Throws std::invalid_argument: there is none with this number, or it was answered.
  Asked answer(std::uint64_t number);
  std::optional<Asked> peek(std::uint64_t number);
  // Large ones by a thread of ours: the copy into the kernel takes long. `asked` is of `answer`.
  void send(const Asked& asked, Memory memory, std::size_t count);
  void keep(std::uint64_t handle, int fd);
  void forget_attributes(std::uint64_t inode);
  void forget_pages(std::uint64_t inode);
  void forget_entry(std::uint64_t parent, const std::string& name);

  // --- called by the threads of the session
  void ask(fuse_req_t request, const char* kind, std::uint64_t inode, std::vector<FuseArgument> arguments, std::size_t size = 0, std::uint64_t handle = 0,
           bool interruptible = false);
  std::shared_ptr<LocalFile> local(std::uint64_t handle);
  void drop(std::uint64_t handle);
  Memory received(const char* data, std::size_t size);

 private:
  void work();
  void answer_with_data();
  static void interrupted(fuse_req_t request, void* given);

  std::shared_ptr<MemoryPool> pool_, incoming_;
  FuseEvents events_;
  FuseCounts counts_;
  fuse_session* session_ = nullptr;
  bool ended_all_ = false;
  std::shared_timed_mutex life_mutex_;  // held shared by who tells the kernel to forget
  std::atomic<bool> closed_ = false;

  std::mutex threads_mutex_;
  std::condition_variable ended_;
  std::vector<std::thread> threads_;
  int running_ = 0;

  std::mutex asked_mutex_;
  std::uint64_t next_ = 1;
  std::unordered_map<std::uint64_t, Asked> asked_;

  std::atomic<bool> wants_room_ = false;

  struct Answer {
    fuse_req_t request;
    Memory memory;
    std::size_t count;
  };
  std::mutex answers_mutex_;
  std::condition_variable answers_wait_;
  std::deque<Answer> answers_;
  std::vector<std::thread> answering_;
  bool answers_end_ = false;

  std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<LocalFile>> files_;
};

// operations.cpp
const fuse_lowlevel_ops& fuse_operations();
const char* name_of_opcode(std::size_t opcode);

}  // namespace ff
