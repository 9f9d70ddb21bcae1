// The memory of other processes of this host: who may read it, whether a process is still the one that was met, and copies.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ff {

// While a process has one of these, the other processes of its user may read and write its memory, also where Yama permits
// that to a process's ancestors only (scope 1). Elsewhere it changes nothing. What the process had permitted by itself
// (PR_SET_PTRACER, for a debugger) is lost with the first one: the system does not tell it.
class OpenMemory {
 public:
  OpenMemory();
  ~OpenMemory() { close(); }
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
  void close();  // idempotent; not by two threads at once

 private:
  pid_t owner_;  // a forked child has no permission, and must not take its parent's back; 0: closed
};

// A random number of this process and where it lies, by which others prove that it is this process's memory they see.
struct MemoryProbe {
  std::uint64_t pid = 0, address = 0, number = 0;
};

MemoryProbe memory_probe();
bool can_access(const MemoryProbe& probe);   // true where this process can read and write that one's memory

// A process that is not taken for a later one with the same number, where the system has descriptors of processes (Linux 5.3).
// Looking whether it has ended after its memory was read shows that nobody else's was. What remains: a process that ends, is
// reaped, and whose number comes round to another process of the same user, within one operation, may have been written to;
// and one that replaces its program (exec) has other memory, until the end of its connections tells so.
class Process {
 public:
  explicit Process(pid_t pid);  // without a descriptor where there is none to be had
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  static std::shared_ptr<const Process> met(pid_t pid);  // one descriptor for all groups in which it is met

  int descriptor() const { return fd_; }  // readable, to poll(), once it has ended; -1: nobody knows
  bool ended() const;

 private:
  int fd_ = -1;
};

// Copies `bytes` from (into) the memory of that process: 0, or the error, after which any part may have been copied.
int read_memory(pid_t pid, void* to, std::uint64_t address, std::size_t bytes);
int write_memory(pid_t pid, std::uint64_t address, const void* from, std::size_t bytes);

}  // namespace ff
