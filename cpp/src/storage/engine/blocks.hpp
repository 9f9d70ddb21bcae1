// Blocks of fixed classes in preallocated files. Which ones are taken is not stored: the records say it at every start.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"
#include "fireflyer/storage/engine/format.hpp"

namespace ff {

struct BlockLimits {
  std::uint64_t group_bytes;     // space is asked for in pieces of this size, or of one block if that is more
  std::uint64_t capacity_bytes;  // of all files; 0: what the disk has
  double reserve;                // share of the disk that is left free
  std::uint64_t reserve_at_most_bytes;  // and of a large one no more than this
  std::uint64_t least_free_bytes;  // and at least so much, for the journal: blocks must not take what removals need
};

// Space that files have got, and that is not yet anybody's.
struct Growth {
  int block_class = 0;
  std::unique_ptr<DiskFile> created;  // a new file; else the last one has grown
  std::uint32_t blocks = 0;
};

// Not thread-safe: the engine's lock protects all but `grow`, and `file` and `offset` of an address that is taken. `grow`
// asks the disk, which may take long: it is called without that lock, by one caller at a time, who hands the result to `add`
// before anybody else grows.
class Blocks {
 public:
  Blocks(Disk& disk, const BlockLimits& limits);

  std::optional<BlockAddress> take(int block_class);  // a free block
  // One more group: as much of it as there may be, one block at least. Nullopt: the limits, or the disk, are reached.
  std::optional<Growth> grow(int block_class) const;
  void add(Growth growth);
  // At the start: false if there is no such block, or it is taken.
  bool take(const BlockAddress& address);
  void release(const BlockAddress& address);
  bool has(const BlockAddress& address) const;

  // Readers of a block, counted here because the block is where nothing has to be looked for.
  void pin(const BlockAddress& address) { ++readers(address); }
  bool unpin(const BlockAddress& address) { return --readers(address) == 0; }  // true: that was the last one
  bool pinned(const BlockAddress& address) { return readers(address) > 0; }

  void sync() const;  // all files
  DiskFile& file(const BlockAddress& address) const { return *files_[address.block_class][address.file].file; }
  static std::uint64_t offset(const BlockAddress& address) { return address.index * std::uint64_t{stride_bytes(address.block_class)}; }

  std::uint64_t file_bytes() const { return file_bytes_; }    // what the files take of the disk
  std::uint64_t taken_bytes() const { return taken_bytes_; }  // what of it is in use

 private:
  struct File {
    std::unique_ptr<DiskFile> file;
    std::uint32_t blocks = 0, free = 0;
    std::vector<std::uint64_t> taken;  // one bit each
    std::vector<std::uint32_t> readers;
  };

  std::uint32_t& readers(const BlockAddress& address) { return files_[address.block_class][address.file].readers[address.index]; }

  void open_all(const std::vector<std::string>& names);
  bool may_grow(std::uint64_t bytes) const;
  static void add_blocks(File& file, std::uint32_t blocks);

  Disk& disk_;
  BlockLimits limits_;
  std::array<std::vector<File>, block_classes> files_;
  std::array<std::size_t, block_classes> first_free_{};  // no file before this one has a free block
  std::uint64_t file_bytes_ = 0, taken_bytes_ = 0;
};

}  // namespace ff
