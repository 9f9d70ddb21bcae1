// The disk as the chunk engine sees it: a port, so that tests can keep a log of all writes and show every crash to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace ff {

// What the system said (errno), for which operation on which path.
class DiskError : public std::runtime_error {
 public:
  DiskError(int error, const std::string& what);
  int error() const { return error_; }
  bool no_space() const;

 private:
  int error_;
};

using Bytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

// Thread-safe. After a failed sync what was written before may be lost: give the file up.
class DiskFile {
 public:
  virtual ~DiskFile() = default;
  virtual void write(std::uint64_t offset, Bytes data) = 0;                       // all of it, or an error; durable only after sync
  virtual std::size_t read(std::uint64_t offset, MutableBytes into) const = 0;   // fewer bytes only at the end of the file
  // The same, but what the disk itself has, where that can be had; and what was not in memory before does not stay there.
  virtual std::size_t read_from_disk(std::uint64_t offset, MutableBytes into) const { return read(offset, into); }
  // The same, but none if it would have to wait. A file that cannot say so waits.
  virtual std::optional<std::size_t> read_cached(std::uint64_t offset, MutableBytes into) const { return read(offset, into); }
  virtual void allocate(std::uint64_t offset, std::uint64_t bytes) = 0;          // space that later writes need not ask for
  virtual std::uint64_t size() const = 0;
  virtual void sync() = 0;                                                       // data, and the size where it has grown
  virtual void write_back(std::uint64_t, std::uint64_t) {}                        // of offset and bytes, begin; it waits for nothing, and promises nothing
  virtual bool cached(std::uint64_t offset, std::size_t bytes) const = 0;         // reading it waits for nothing, as far as is known
  virtual void forget(std::uint64_t, std::uint64_t) {}                            // of offset and bytes, what is synced: the next read asks the disk
  virtual int descriptor() const = 0;                                            // for sendfile; -1 where there is none
};

// For who looks at all that a disk has: reads of it are `read_from_disk` of the other one. It can do nothing else.
class FromDisk final : public DiskFile {
 public:
  explicit FromDisk(const DiskFile& file) : file_(file) {}
  std::size_t read(std::uint64_t offset, MutableBytes into) const override { return file_.read_from_disk(offset, into); }
  std::uint64_t size() const override { return file_.size(); }
  bool cached(std::uint64_t, std::size_t) const override { return false; }
  int descriptor() const override { return -1; }
  void write(std::uint64_t, Bytes) override { only_read(); }
  void allocate(std::uint64_t, std::uint64_t) override { only_read(); }
  void sync() override { only_read(); }

 private:
  [[noreturn]] static void only_read() { throw std::logic_error("this view of a file is for reading"); }
  const DiskFile& file_;
};

struct DiskSpace {
  std::uint64_t total_bytes, free_bytes;
};

// One directory, no subdirectories. Creations, renames and removals are durable only after sync_directory.
class Disk {
 public:
  virtual ~Disk() = default;
  virtual std::unique_ptr<DiskFile> create(const std::string& name) = 0;  // EEXIST if it is there
  virtual std::unique_ptr<DiskFile> open(const std::string& name) = 0;    // for reading and writing; ENOENT
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& name) = 0;
  virtual std::vector<std::string> list() const = 0;  // sorted
  virtual void sync_directory() = 0;
  virtual DiskSpace space() const = 0;
};

// The directory `path` of this machine, which must exist.
std::unique_ptr<Disk> real_disk(const std::string& path);

// While it lives no other one of this machine has the directory. Throws DiskError EWOULDBLOCK if another one has.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& path);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_;
};

}  // namespace ff
