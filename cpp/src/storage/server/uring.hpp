// The kernel's rings for asynchronous reads of files (io_uring), and no more of them than that. Opened, used and closed by one
// thread: the kernel does its part of the work in the thread that opened them, and interrupts what it waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "fireflyer/storage/engine/disk.hpp"

namespace ff {

class Uring {
 public:
  // Null where the kernel does not have it, is too old, or its owner forbids it (seccomp, sysctl).
  static std::unique_ptr<Uring> open(unsigned entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  int descriptor() const { return fd_; }  // readable when there is something to take
  // Queued until `submit`; `into` is written until its result is taken. False: the queue is full, submit and try later.
  bool read(int file, std::uint64_t offset, MutableBytes into, std::uint64_t tag);
  void cancel_all();  // as far as the kernel can; each read still has a result
  void submit();      // what the kernel does not take now stays queued
  // Results: bytes, or -errno. `each` may queue others.
  void take(const std::function<void(std::uint64_t tag, int result)>& each);
  bool wait(int timeout_ms) const;  // for something to take
  bool queued() const { return queued_ > 0; }

 private:
  struct Map;
  Uring(int fd, std::unique_ptr<Map> map);
  void* next_entry();
  long enter(unsigned submitted, unsigned flags) const;

  int fd_;
  std::unique_ptr<Map> map_;
  unsigned queued_ = 0;
};

}  // namespace ff
