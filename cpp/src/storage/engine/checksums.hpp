// Checksums of granules that were read before, so that a small read looks into the page cache once and not twice.
//
// Lines of 16 granules in a table without chains: two that fall on one place drive each other out. A line belongs to one
// content in one block, and neither ever changes, so nothing has to be kept in step. Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <span>

#include "fireflyer/storage/engine/format.hpp"

namespace ff {

class ChecksumCache {
 public:
  static constexpr std::uint32_t line_granules = 16;

  // The table takes memory as it is used.
  explicit ChecksumCache(std::size_t lines) : count_(std::bit_floor(std::max<std::size_t>(lines, 1))), lines_(static_cast<Line*>(std::calloc(count_, sizeof(Line)))) {
    if (!lines_) throw std::bad_alloc();
  }

  // Checksums first, first + 1, ... of the content; `read(first, into)` gets those that are not here. False: it said so.
  template <class Read>
  bool get(const ChunkId& chunk, const Content& content, std::uint32_t first, std::span<std::uint32_t> into, const Read& read) {
    for (std::size_t done = 0; done < into.size();) {
      const auto granule = first + static_cast<std::uint32_t>(done);
      const std::uint32_t from = granule / line_granules * line_granules;
      const std::size_t skip = granule - from, n = std::min(line_granules - skip, into.size() - done);
      const Key key{chunk, content.id(), content.block(), from};
      const std::size_t place = place_of(key);
      if (!copy(key, place, skip, into.subspan(done, n))) {
        std::array<std::uint32_t, line_granules> fresh{};
        if (!read(from, std::span(fresh).first(std::min<std::size_t>(line_granules, granules_of(content.length) - from)))) return false;
        std::copy_n(fresh.begin() + static_cast<std::ptrdiff_t>(skip), n, into.begin() + static_cast<std::ptrdiff_t>(done));
        const std::lock_guard lock(locks_[place % locks_.size()]);
        lines_[place] = {key, fresh};
      }
      done += n;
    }
    return true;
  }

  void forget(const ChunkId& chunk, const Content& content) {
    for (std::uint32_t from = 0; from < granules_of(content.length); from += line_granules) {
      const Key key{chunk, content.id(), content.block(), from};
      const std::size_t place = place_of(key);
      const std::lock_guard lock(locks_[place % locks_.size()]);
      if (lines_[place].key == key) lines_[place].key = {};
    }
  }

 private:
  struct Key {
    ChunkId chunk;
    ContentId content;  // version 0, which no content has: nothing is here
    BlockAddress block;
    std::uint32_t granule;
    bool operator==(const Key&) const = default;
  };
  struct Line {
    Key key;
    std::array<std::uint32_t, line_granules> checksums;
  };
  struct Free {
    void operator()(Line* lines) const { std::free(lines); }
  };

  std::size_t place_of(const Key& key) const {
    std::uint64_t h = key.chunk.file * 0x9e3779b97f4a7c15u ^ key.content.version;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u + (std::uint64_t{key.chunk.index} << 32 | key.granule);
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return (h ^ h >> 32) & (count_ - 1);
  }

  bool copy(const Key& key, std::size_t place, std::size_t skip, std::span<std::uint32_t> into) {
    const std::lock_guard lock(locks_[place % locks_.size()]);
    const Line& line = lines_[place];
    if (line.key != key) return false;
    std::copy_n(line.checksums.begin() + static_cast<std::ptrdiff_t>(skip), into.size(), into.begin());
    return true;
  }

  const std::size_t count_;
  const std::unique_ptr<Line[], Free> lines_;
  std::array<std::mutex, 64> locks_;
};

}  // namespace ff
