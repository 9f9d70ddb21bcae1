// Writing the content of a block from old content and new bytes, and reading it back verified.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "fireflyer/storage/engine/engine.hpp"

namespace ff {

struct BlockPlace {
  DiskFile& file;
  std::uint64_t offset;
  int block_class;
};

// Fills `into`, or throws EngineError damaged. False: it is not in memory, and it may not wait.
bool read_all(const DiskFile& file, std::uint64_t offset, MutableBytes into, bool may_wait = true);

// New content of `length` bytes: `data` at `data_offset`, else the old content, else zeros. Old bytes are verified as they
// are copied. Fills length and crc of `content` and writes block and trailer; nothing is durable yet. `data_crc`, for data
// that are whole granules of the content: refused (usage) if they have another one.
void write_content(const BlockPlace& place, const ChunkId& chunk, Content& content, std::uint32_t length, std::uint32_t data_offset, Bytes data,
                   const std::optional<std::uint32_t>& data_crc, const ChunkEngine::View* old);
[[noreturn]] void refuse_data();

// The checksums of granules are kept with a mark of chunk and content, taken off again here: a block whose last writing never
// reached the disk, and that still has another content and that one's trailer, does not match.
std::size_t read_content(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content, std::uint32_t from, MutableBytes into);
// False: they are not in memory, and it may not wait.
bool read_checksums(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content, std::uint32_t first,
                    std::span<std::uint32_t> into, bool may_wait = true);
void verify_content(const DiskFile& file, std::uint64_t offset, const ChunkId& chunk, const Content& content);

}  // namespace ff
