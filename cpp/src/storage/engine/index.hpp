// The records of all chunks in memory, in order: leaves of up to 128 records under a small map.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include "fireflyer/storage/engine/format.hpp"

namespace ff {

struct ChunkRecord {
  ChunkId id;
  Content committed;
};

class ChunkIndex {
 public:
  const ChunkRecord* find(const ChunkId& id) const {
    const Leaf& leaf = leaf_of(id)->second;
    const auto at = place(leaf, id);
    return at != leaf.end() && at->id == id ? &*at : nullptr;
  }

  // Replaces the record of that id, or adds it. Pointers that were given out before do not outlive this.
  void put(const ChunkRecord& record) {
    Leaf& leaf = leaf_of(record.id)->second;
    const auto at = place(leaf, record.id);
    if (at != leaf.end() && at->id == record.id) {
      *at = record;
      return;
    }
    ++size_;
    if (leaf.size() < leaf_records) {
      leaf.insert(at, record);
      return;
    }
    // Files grow at their end: a full leaf that is appended to stays full, others are halved.
    const bool at_end = at == leaf.end();
    const auto middle = at_end ? leaf.end() : leaf.begin() + static_cast<std::ptrdiff_t>(leaf_records / 2);
    const ChunkId first = at_end ? record.id : middle->id;
    Leaf& upper = leaves_.emplace(first, Leaf(middle, leaf.end())).first->second;
    leaf.erase(middle, leaf.end());
    Leaf& target = record.id < first ? leaf : upper;
    target.insert(place(target, record.id), record);
  }

  void erase(const ChunkId& id) {
    const auto leaf = leaf_of(id);
    const auto at = place(leaf->second, id);
    if (at == leaf->second.end() || at->id != id) return;
    leaf->second.erase(at);
    --size_;
    if (leaf->second.empty() && leaf != leaves_.begin()) leaves_.erase(leaf);
  }

  // The first record that is not before `id`; nullptr: none.
  const ChunkRecord* first_from(const ChunkId& id) const {
    auto leaf = leaf_of(id);
    const auto at = place(leaf->second, id);
    if (at != leaf->second.end()) return &*at;
    return ++leaf == leaves_.end() ? nullptr : &leaf->second.front();
  }

  // The last record before `id`; nullptr: none.
  const ChunkRecord* last_before(const ChunkId& id) const {
    const auto leaf = leaf_of(id);
    const auto at = place(leaf->second, id);
    if (at != leaf->second.begin()) return &*std::prev(at);
    if (leaf == leaves_.begin()) return nullptr;
    const Leaf& earlier = std::prev(leaf)->second;
    return earlier.empty() ? nullptr : &earlier.back();
  }

  std::size_t size() const { return size_; }

  // What the records take, without the allocator's own overhead.
  std::size_t memory_bytes() const {
    std::size_t bytes = 0;
    for (const auto& [id, leaf] : leaves_) bytes += leaf.capacity() * sizeof(ChunkRecord) + sizeof(id) + sizeof(leaf) + 32;
    return bytes;
  }

 private:
  static constexpr std::size_t leaf_records = 128;
  using Leaf = std::vector<ChunkRecord>;
  using Leaves = std::map<ChunkId, Leaf>;

  // The leaf in which `id` is or would be.
  Leaves::iterator leaf_of(const ChunkId& id) { return std::prev(leaves_.upper_bound(id)); }
  Leaves::const_iterator leaf_of(const ChunkId& id) const { return std::prev(leaves_.upper_bound(id)); }

  template <class AnyLeaf>
  static auto place(AnyLeaf& leaf, const ChunkId& id) -> decltype(leaf.begin()) {
    return std::lower_bound(leaf.begin(), leaf.end(), id, [](const ChunkRecord& record, const ChunkId& wanted) { return record.id < wanted; });
  }

  Leaves leaves_{{ChunkId{}, Leaf{}}};  // by a bound not above their first record; only the first may be empty
  std::size_t size_ = 0;
};

}  // namespace ff
