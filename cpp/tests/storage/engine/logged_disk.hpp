// A disk in memory that logs what is done to it, and can show what a power cut may leave after any operation.
//
// What was synced is there. Of what was not, any part may be: each 512-byte sector of a write, each change of the
// directory, each growth of a file.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"

namespace ff::test {

inline constexpr std::size_t sector_bytes = 512;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
};

struct Operation {
  enum Kind {
    write,
    grow,
    sync,
    create,
    rename,
    remove,
    sync_directory
  } kind;
  int file = -1;
  std::uint64_t offset = 0;
  std::vector<std::byte> data;
  std::string name, to;
};

using Image = std::map<std::string, std::vector<std::byte>>;  // what is on the disk: files by name

class LoggedDisk;

class LoggedFile final : public DiskFile {
 public:
  LoggedFile(LoggedDisk& disk, int file) : disk_(disk), file_(file) {}
  void write(std::uint64_t offset, Bytes data) override;
  std::size_t read(std::uint64_t offset, MutableBytes into) const override;
  void allocate(std::uint64_t offset, std::uint64_t bytes) override;
  std::uint64_t size() const override;
  void sync() override;
  void write_back(std::uint64_t offset, std::uint64_t bytes) override;  // changes nothing of what a power cut may leave
  std::optional<std::size_t> read_cached(std::uint64_t offset, MutableBytes into) const override;
  bool cached(std::uint64_t offset, std::size_t bytes) const override;
  int descriptor() const override { return -1; }

 private:
  LoggedDisk& disk_;
  int file_;
};

class LoggedDisk final : public Disk {
 public:
  std::vector<Operation> log;
  std::uint64_t total_bytes = std::uint64_t{1} << 40, free_bytes = std::uint64_t{1} << 40;
  std::function<int(const Operation&)> refuse;  // an errno instead of the operation; 0: none
  std::function<void(int file)> before_write;   // what others do meanwhile
  std::function<void()> before_read, before_sync, before_grow;
  std::function<void(int file)> before_read_of;
  std::function<void(int file, std::uint64_t offset, std::uint64_t bytes)> before_write_back;
  std::atomic<bool> cold = false;               // nothing is in the page cache, and nothing stays there

  LoggedDisk() = default;
  explicit LoggedDisk(Image image) : start_(image) {
    for (auto& [name, data] : image) {
      names_[name] = static_cast<int>(files_.size());
      files_.push_back(std::move(data));
    }
  }

  // As a process that was killed after the first `count` operations leaves it: all is there, but not all of it is durable.
  LoggedDisk(const LoggedDisk& other, std::size_t count) : LoggedDisk(other.start_) {
    for (std::size_t i = 0; i < count; ++i) {
      const Operation& op = other.log[i];
      if (op.kind == Operation::create) files_.resize(std::max(files_.size(), static_cast<std::size_t>(op.file) + 1));
      if (changes_directory(op)) change(names_, op);
      if (op.kind == Operation::write || op.kind == Operation::grow) {
        auto& data = files_[static_cast<std::size_t>(op.file)];
        data.resize(std::max<std::size_t>(data.size(), op.offset + op.data.size()));
        if (!op.data.empty()) std::memcpy(data.data() + op.offset, op.data.data(), op.data.size());
      }
      log.push_back(op);
    }
  }

  std::unique_ptr<DiskFile> create(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    if (names_.contains(name)) throw DiskError(EEXIST, "cannot create " + name);
    note({Operation::create, static_cast<int>(files_.size()), 0, {}, name, {}});
    names_[name] = static_cast<int>(files_.size());
    files_.emplace_back();
    return std::make_unique<LoggedFile>(*this, names_[name]);
  }
  std::unique_ptr<DiskFile> open(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    if (!names_.contains(name)) throw DiskError(ENOENT, "cannot open " + name);
    return std::make_unique<LoggedFile>(*this, names_[name]);
  }
  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    note({Operation::rename, -1, 0, {}, from, to});
    names_[to] = names_.at(from);
    names_.erase(from);
  }
  void remove(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    note({Operation::remove, -1, 0, {}, name, {}});
    if (names_.erase(name) == 0) throw DiskError(ENOENT, "cannot remove " + name);
  }
  std::vector<std::string> list() const override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, file] : names_) names.push_back(name);
    return names;
  }
  void sync_directory() override {
    const std::lock_guard lock(mutex_);
    note({Operation::sync_directory, -1, 0, {}, {}, {}});
  }
  DiskSpace space() const override { return {total_bytes, free_bytes}; }

  std::string name_of(int file) const {
    const std::lock_guard lock(mutex_);
    return name_when_locked(file);
  }
  std::string name_when_locked(int file) const {  // for `refuse`
    for (const auto& [name, number] : names_)
      if (number == file) return name;
    return {};
  }

  std::vector<std::byte>& content(const std::string& name) { return files_[static_cast<std::size_t>(names_.at(name))]; }

  // What may be there when the power is cut after the first `count` operations.
  Image after_power_cut(std::size_t count, Random& random) const {
    enum {
      nothing,
      everything,
      something
    } mode = static_cast<decltype(mode)>(random.below(3));
    const auto stays = [&] { return mode == everything || (mode == something && random.below(2) == 0); };
    std::vector<std::vector<std::byte>> files;
    std::map<std::string, int> names;
    for (const auto& [name, data] : start_) {
      names[name] = static_cast<int>(files.size());
      files.push_back(data);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const Operation& op = log[i];
      if (op.kind == Operation::create) files.resize(std::max(files.size(), static_cast<std::size_t>(op.file) + 1));
      if (changes_directory(op) && (synced_later(i, count) || stays())) change(names, op);
      if (op.kind != Operation::write && op.kind != Operation::grow) continue;
      const bool durable = synced_later(i, count);
      auto& data = files[static_cast<std::size_t>(op.file)];
      if (op.kind == Operation::grow) {
        if (durable || stays()) data.resize(std::max<std::size_t>(data.size(), op.offset));
        continue;
      }
      for (std::size_t from = 0; from < op.data.size();) {
        const std::size_t n = std::min(sector_bytes - (op.offset + from) % sector_bytes, op.data.size() - from);
        if (durable || stays()) {
          data.resize(std::max<std::size_t>(data.size(), op.offset + from + n));
          std::memcpy(data.data() + op.offset + from, op.data.data() + from, n);
        }
        from += n;
      }
    }
    Image image;
    for (const auto& [name, file] : names) image[name] = files[static_cast<std::size_t>(file)];
    return image;
  }

 private:
  friend class LoggedFile;

  static bool changes_directory(const Operation& op) { return op.kind == Operation::create || op.kind == Operation::rename || op.kind == Operation::remove; }

  static void change(std::map<std::string, int>& names, const Operation& op) {
    if (op.kind == Operation::create) names[op.name] = op.file;
    if (op.kind == Operation::rename && names.contains(op.name)) names[op.to] = names.at(op.name);
    if (op.kind != Operation::create) names.erase(op.name);
  }

  bool synced_later(std::size_t i, std::size_t count) const {
    for (std::size_t k = i + 1; k < count; ++k) {
      if (changes_directory(log[i]) ? log[k].kind == Operation::sync_directory : log[k].kind == Operation::sync && log[k].file == log[i].file) return true;
    }
    return false;
  }

  void note(Operation op) {
    if (const int error = refuse ? refuse(op) : 0; error != 0) throw DiskError(error, "the test refuses");
    log.push_back(std::move(op));
  }

  mutable std::mutex mutex_;
  Image start_;
  std::map<std::string, int> names_;
  std::vector<std::vector<std::byte>> files_;
};

inline void LoggedFile::write(std::uint64_t offset, Bytes data) {
  if (disk_.before_write) disk_.before_write(file_);
  const std::lock_guard lock(disk_.mutex_);
  disk_.note({Operation::write, file_, offset, {data.begin(), data.end()}, {}, {}});
  auto& content = disk_.files_[static_cast<std::size_t>(file_)];
  content.resize(std::max<std::size_t>(content.size(), offset + data.size()));
  std::memcpy(content.data() + offset, data.data(), data.size());
}

inline bool LoggedFile::cached(std::uint64_t, std::size_t) const { return !disk_.cold; }

inline std::optional<std::size_t> LoggedFile::read_cached(std::uint64_t offset, MutableBytes into) const {
  return disk_.cold ? std::nullopt : std::optional(read(offset, into));
}

inline std::size_t LoggedFile::read(std::uint64_t offset, MutableBytes into) const {
  if (disk_.before_read) disk_.before_read();
  if (disk_.before_read_of) disk_.before_read_of(file_);
  const std::lock_guard lock(disk_.mutex_);
  const auto& content = disk_.files_[static_cast<std::size_t>(file_)];
  if (offset >= content.size()) return 0;
  const std::size_t n = std::min<std::size_t>(into.size(), content.size() - offset);
  std::memcpy(into.data(), content.data() + offset, n);
  return n;
}

inline void LoggedFile::allocate(std::uint64_t offset, std::uint64_t bytes) {
  if (disk_.before_grow) disk_.before_grow();
  const std::lock_guard lock(disk_.mutex_);
  disk_.note({Operation::grow, file_, offset + bytes, {}, {}, {}});
  auto& content = disk_.files_[static_cast<std::size_t>(file_)];
  content.resize(std::max<std::size_t>(content.size(), offset + bytes));
}

inline std::uint64_t LoggedFile::size() const {
  const std::lock_guard lock(disk_.mutex_);
  return disk_.files_[static_cast<std::size_t>(file_)].size();
}

inline void LoggedFile::write_back(std::uint64_t offset, std::uint64_t bytes) {
  if (disk_.before_write_back) disk_.before_write_back(file_, offset, bytes);
}

inline void LoggedFile::sync() {
  if (disk_.before_sync) disk_.before_sync();
  const std::lock_guard lock(disk_.mutex_);
  disk_.note({Operation::sync, file_, 0, {}, {}, {}});
}

}  // namespace ff::test
