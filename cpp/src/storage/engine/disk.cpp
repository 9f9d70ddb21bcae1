#include "fireflyer/storage/engine/disk.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>

namespace ff {

DiskError::DiskError(int error, const std::string& what) : std::runtime_error(what + ": " + std::strerror(error)), error_(error) {}

bool DiskError::no_space() const { return error_ == ENOSPC || error_ == EDQUOT; }

namespace {

constexpr std::size_t page_bytes = 4096;

constexpr std::uint64_t page_of(std::uint64_t offset) { return offset & ~std::uint64_t{page_bytes - 1}; }

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

class RealFile final : public DiskFile {
 public:
  RealFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  void write(std::uint64_t offset, Bytes data) override {
    while (!data.empty()) {
      const ssize_t n = ::pwrite(fd_.get(), data.data(), data.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw DiskError(errno, "cannot write to " + path_);
      data = data.subspan(static_cast<std::size_t>(n));
      offset += static_cast<std::uint64_t>(n);
    }
  }

  std::size_t read(std::uint64_t offset, MutableBytes into) const override {
    std::size_t done = 0;
    while (done < into.size()) {
      const ssize_t n = ::pread(fd_.get(), into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw DiskError(errno, "cannot read from " + path_);
      if (n == 0) break;
      done += static_cast<std::size_t>(n);
    }
    return done;
  }

  std::size_t read_from_disk(std::uint64_t offset, MutableBytes into) const override {
    // Another description of the same file: the flag would count for everybody who has this one.
    const Descriptor direct(::open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (direct.get() >= 0)
      if (const auto got = read_direct(direct.get(), offset, into)) return *got;
    // No more than a try: after a sync that failed memory may have what the disk has not.
    const std::uint64_t begin = page_of(offset), bytes = page_of(offset + into.size() + page_bytes - 1) - begin;
    const bool was_cached = cached(offset, into.size());
    if (bytes > 0) drop(begin, bytes);
    const std::size_t got = read(offset, into);
    if (!was_cached && bytes > 0) drop(begin, bytes);
    return got;
  }

  std::optional<std::size_t> read_cached(std::uint64_t offset, MutableBytes into) const override {
    std::size_t done = 0;
    while (done < into.size()) {
      const iovec part{into.data() + done, into.size() - done};
      const ssize_t n = ::preadv2(fd_.get(), &part, 1, static_cast<off_t>(offset + done), RWF_NOWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return std::nullopt;
      if (n <= 0) return done + read(offset + done, into.subspan(done));  // 0: the end of the file, or no more in memory
      done += static_cast<std::size_t>(n);
    }
    return done;
  }

  void allocate(std::uint64_t offset, std::uint64_t bytes) override {
    // A file system without it (EOPNOTSUPP) gives the space when it is written: then NoSpace comes later, not never.
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 || errno == EOPNOTSUPP) return;
    throw DiskError(errno, "cannot allocate " + std::to_string(bytes) + " bytes for " + path_);
  }

  std::uint64_t size() const override {
    struct stat status{};
    if (::fstat(fd_.get(), &status) != 0) throw DiskError(errno, "cannot stat " + path_);
    return static_cast<std::uint64_t>(status.st_size);
  }

  void sync() override {
    if (::fdatasync(fd_.get()) != 0) throw DiskError(errno, "cannot sync " + path_);
  }

  void write_back(std::uint64_t offset, std::uint64_t bytes) override {
    // Whatever goes wrong (a file system that cannot do it, a disk that fails) shows in the sync, which nothing replaces.
    (void)::sync_file_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
  }

  // Looks at one byte in so many: pages come and go in larger pieces.
  bool cached(std::uint64_t offset, std::size_t bytes) const override {
    constexpr std::size_t step = std::size_t{64} << 10;
    for (std::size_t at = 0; at < bytes; at += step)
      if (!cached_at(offset + at)) return false;
    return bytes == 0 || (bytes - 1) % step < page_bytes || cached_at(offset + bytes - 1);
  }

  void forget(std::uint64_t offset, std::uint64_t bytes) override { drop(offset, bytes); }

  int descriptor() const override { return fd_.get(); }

 private:
  void drop(std::uint64_t offset, std::uint64_t bytes) const {
    (void)::posix_fadvise(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  }

  // Whole pages, by way of memory that begins with one. Nullopt: the file system does not do that.
  std::optional<std::size_t> read_direct(int fd, std::uint64_t offset, MutableBytes into) const {
    const std::uint64_t begin = page_of(offset), end = page_of(offset + into.size() + page_bytes - 1);
    const auto bytes = static_cast<std::size_t>(end - begin);
    const std::unique_ptr<std::byte, decltype(&std::free)> pages(static_cast<std::byte*>(std::aligned_alloc(page_bytes, std::max(bytes, page_bytes))), &std::free);
    if (!pages) throw std::bad_alloc();
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t n = ::pread(fd, pages.get() + done, bytes - done, static_cast<off_t>(begin + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EINVAL) return std::nullopt;
      if (n < 0) throw DiskError(errno, "cannot read from " + path_);
      done += static_cast<std::size_t>(n);
      if (n == 0 || done % page_bytes != 0) break;  // the end of the file
    }
    const auto skip = static_cast<std::size_t>(offset - begin);
    const std::size_t got = std::min(into.size(), done > skip ? done - skip : 0);
    if (got > 0) std::memcpy(into.data(), pages.get() + skip, got);
    return got;
  }

  // A file system that cannot say so is taken at its word when it answers.
  bool cached_at(std::uint64_t offset) const {
    char byte = 0;
    const iovec part{&byte, 1};
    return ::preadv2(fd_.get(), &part, 1, static_cast<off_t>(offset), RWF_NOWAIT) >= 0 || errno != EAGAIN;
  }

  Descriptor fd_;
  std::string path_;
};

class RealDisk final : public Disk {
 public:
  RealDisk(int fd, std::string path) : directory_(fd), path_(std::move(path)) {}

  std::unique_ptr<DiskFile> create(const std::string& name) override { return opened(name, O_CREAT | O_EXCL); }
  std::unique_ptr<DiskFile> open(const std::string& name) override { return opened(name, 0); }

  void rename(const std::string& from, const std::string& to) override {
    if (::renameat(directory_.get(), from.c_str(), directory_.get(), to.c_str()) != 0) throw DiskError(errno, "cannot rename " + path_ + "/" + from);
  }

  void remove(const std::string& name) override {
    if (::unlinkat(directory_.get(), name.c_str(), 0) != 0) throw DiskError(errno, "cannot remove " + path_ + "/" + name);
  }

  std::vector<std::string> list() const override {
    const int fd = ::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* entries = fd < 0 ? nullptr : ::fdopendir(fd);
    if (entries == nullptr) {
      const int error = errno;
      if (fd >= 0) ::close(fd);
      throw DiskError(error, "cannot list " + path_);
    }
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(entries)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int error = errno;
    ::closedir(entries);
    if (error != 0) throw DiskError(error, "cannot list " + path_);
    std::sort(names.begin(), names.end());
    return names;
  }

  void sync_directory() override {
    if (::fsync(directory_.get()) != 0) throw DiskError(errno, "cannot sync " + path_);
  }

  DiskSpace space() const override {
    struct statvfs status{};
    if (::fstatvfs(directory_.get(), &status) != 0) throw DiskError(errno, "cannot ask for the free space of " + path_);
    return {status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize};
  }

 private:
  std::unique_ptr<DiskFile> opened(const std::string& name, int flags) const {
    const int fd = ::openat(directory_.get(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
    if (fd < 0) throw DiskError(errno, std::string("cannot ") + (flags != 0 ? "create " : "open ") + path_ + "/" + name);
    return std::make_unique<RealFile>(fd, path_ + "/" + name);
  }

  Descriptor directory_;
  std::string path_;
};

}  // namespace

std::unique_ptr<Disk> real_disk(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw DiskError(errno, "cannot open the directory " + path);
  return std::make_unique<RealDisk>(fd, path);
}

DirectoryLock::DirectoryLock(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0) throw DiskError(errno, "cannot open the directory " + path);
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  ::close(fd_);
  throw DiskError(error, "cannot lock the directory " + path + "; another process may be using it");
}

DirectoryLock::~DirectoryLock() { ::close(fd_); }

}  // namespace ff
