// What the chunk engine writes to disk, byte for byte. Little-endian; every structure is protected by a CRC-32C.
//
//   blocks-CC-FFFF     blocks of one class: data, then a trailer with the checksums of its granules
//   journal-NNNNNNNN   batches of entries; each entry says what is now true of one thing, so applying it twice is harmless
//                      Behind them zeros: room that was asked for in advance.
//   snapshot-NNNNNNNN  the same batches: what was true when journal NNNNNNNN began, and maybe some of what came after
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ff {

static_assert(std::endian::native == std::endian::little, "structures are written as they lie in memory");

inline constexpr std::size_t granule_bytes = 4096;  // the unit of checksums: a read verifies the granules that it touches
inline constexpr int block_classes = 11;
inline constexpr std::size_t min_block_bytes = std::size_t{64} << 10;
inline constexpr std::size_t max_block_bytes = min_block_bytes << (block_classes - 1);
inline constexpr std::size_t trailer_header_bytes = 64;

constexpr std::size_t block_bytes(int block_class) { return min_block_bytes << block_class; }
constexpr std::size_t granules_of(std::size_t length) { return (length + granule_bytes - 1) / granule_bytes; }
constexpr std::size_t trailer_bytes(int block_class) {
  return granules_of(trailer_header_bytes + sizeof(std::uint32_t) * granules_of(block_bytes(block_class))) * granule_bytes;
}
constexpr std::size_t stride_bytes(int block_class) { return block_bytes(block_class) + trailer_bytes(block_class); }

// The smallest class that holds `length` bytes, which is at most max_block_bytes.
constexpr int class_of(std::size_t length) {
  int block_class = 0;
  while (block_bytes(block_class) < length) ++block_class;
  return block_class;
}

struct ChunkId {
  std::uint64_t file = 0;
  std::uint32_t index = 0;
  auto operator<=>(const ChunkId&) const = default;
};

// Names the content of a chunk for ever. Version 0: the chunk is absent.
struct ContentId {
  std::uint32_t made_in = 0;
  std::uint64_t version = 0;
  auto operator<=>(const ContentId&) const = default;
};

struct BlockAddress {
  std::uint32_t file = 0;
  std::uint16_t index = 0;
  std::uint8_t block_class = 0;
  auto operator<=>(const BlockAddress&) const = default;
};

inline constexpr std::uint32_t journal_magic = 0x314a4646;  // "FFJ1"
inline constexpr std::uint32_t trailer_magic = 0x32424646;  // "FFB2"
inline constexpr std::size_t batch_align_bytes = 4096;      // no two batches share a sector: a torn one cannot hurt its elder
inline constexpr std::size_t max_batch_bytes = std::size_t{1} << 20;

enum class EntryKind : std::uint32_t {
  put_chunk = 1,
  erase_chunk,
  put_request,
  erase_client,
  erase_requests,
  follows,
  end
};

enum class ContentState : std::uint8_t {
  none,
  data,
  removed
};

// A chunk's content, in an entry and in memory. One of no bytes has no block.
struct Content {
  std::uint64_t version = 0;
  std::uint32_t made_in = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;  // of all its bytes
  std::uint32_t block_file = 0;
  std::uint16_t block_index = 0;
  std::uint8_t block_class = 0;
  ContentState state = ContentState::none;
  std::uint32_t reserved = 0;

  ContentId id() const { return {made_in, version}; }
  BlockAddress block() const { return {block_file, block_index, block_class}; }
  bool has_block() const { return state == ContentState::data && length > 0; }
};

struct ChunkEntry {
  Content committed, pending;
};

// The last update of a client's channel, so that its repetition is recognised. Version 0: it was given up.
struct RequestEntry {
  std::uint64_t client = 0, sequence = 0;  // sequence 0: no request
  std::uint64_t chunk_file = 0, version = 0;
  std::uint32_t channel = 0, chunk_index = 0, made_in = 0, reserved = 0;
};

// An update is one entry, with its request, so that neither is ever there without the other.
struct Entry {
  EntryKind kind{};
  std::uint32_t index = 0;  // of the chunk; of a journal that is followed, or stands beside the snapshot that ends
  std::uint64_t file = 0;   // of the chunk; the client that is forgotten; how many batches that journal has, or has at least
  ChunkEntry chunk;
  RequestEntry request;
};

inline constexpr std::uint32_t batch_after_sync = 1;    // all batches before this one, and their content, were durable when it was written
inline constexpr std::uint32_t batch_with_content = 2;  // its group's content is synced while it is: see for yourself that it is there
inline constexpr std::size_t entries_per_batch = (max_batch_bytes - 32) / sizeof(Entry);

struct BatchHeader {
  std::uint32_t magic = journal_magic;
  std::uint32_t crc = 0;       // of everything behind this field, padding included
  std::uint64_t sequence = 0;  // number of the file << 32 | number of the batch in it
  std::uint32_t entries = 0;
  std::uint32_t flags = 0;
  std::uint64_t bytes = 0;  // of the batch with header and padding
};

struct TrailerHeader {
  std::uint32_t magic = trailer_magic;
  std::uint32_t crc = 0;  // of everything behind this field, and of the checksums that follow (which are marked: content.hpp)
  std::uint64_t file = 0, version = 0;
  std::uint32_t index = 0, made_in = 0;
  std::uint32_t length = 0, content_crc = 0;
  std::uint32_t granules = 0, reserved = 0;
  std::uint64_t reserved_too[2] = {0, 0};
};

static_assert(sizeof(Content) == 32 && sizeof(ChunkEntry) == 64 && sizeof(RequestEntry) == 48 && sizeof(Entry) == 128);
static_assert(sizeof(BatchHeader) == 32 && sizeof(TrailerHeader) == trailer_header_bytes);
static_assert(std::has_unique_object_representations_v<Entry> && std::has_unique_object_representations_v<TrailerHeader>);
static_assert(max_batch_bytes % batch_align_bytes == 0);

}  // namespace ff
