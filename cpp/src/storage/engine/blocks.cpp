#include "blocks.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <stdexcept>

namespace ff {
namespace {

constexpr std::uint64_t max_file_bytes = std::uint64_t{4} << 30;  // 4000 descriptors for 16 TB
constexpr std::uint32_t word_bits = 64;

std::uint32_t blocks_per_file(int block_class) {
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(max_file_bytes / stride_bytes(block_class), 1, 1u << 16));
}

std::string name_of(int block_class, std::size_t file) {
  char name[32];
  std::snprintf(name, sizeof name, "blocks-%02d-%04zu", block_class, file);
  return name;
}

}  // namespace

Blocks::Blocks(Disk& disk, const BlockLimits& limits) : disk_(disk), limits_(limits) { open_all(disk.list()); }

void Blocks::open_all(const std::vector<std::string>& names) {
  for (int k = 0; k < block_classes; ++k)
    for (;;) {
      const std::string name = name_of(k, files_[k].size());
      if (!std::binary_search(names.begin(), names.end(), name)) break;
      File& opened = files_[k].emplace_back();
      opened.file = disk_.open(name);
      const std::uint64_t bytes = opened.file->size();
      add_blocks(opened, static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes / stride_bytes(k), blocks_per_file(k))));
      file_bytes_ += bytes;
    }
}

void Blocks::add_blocks(File& file, std::uint32_t blocks) {
  file.blocks += blocks;
  file.free += blocks;
  file.taken.resize((file.blocks + word_bits - 1) / word_bits);
  file.readers.resize(file.blocks);
}

std::optional<BlockAddress> Blocks::take(int block_class) {
  auto& files = files_[block_class];
  std::size_t& first = first_free_[block_class];
  while (first < files.size() && files[first].free == 0) ++first;
  if (first == files.size()) return std::nullopt;
  File& file = files[first];
  for (std::size_t word = 0;; ++word) {
    const auto bit = static_cast<std::uint32_t>(std::countr_one(file.taken[word]));
    const std::size_t index = word * word_bits + bit;
    if (bit == word_bits || index >= file.blocks) continue;
    const BlockAddress address{static_cast<std::uint32_t>(first), static_cast<std::uint16_t>(index), static_cast<std::uint8_t>(block_class)};
    take(address);
    return address;
  }
}

void Blocks::sync() const {
  for (const auto& files : files_)
    for (const File& file : files) file.file->sync();
}

bool Blocks::has(const BlockAddress& address) const {
  if (address.block_class >= block_classes || address.file >= files_[address.block_class].size()) return false;
  return address.index < files_[address.block_class][address.file].blocks;
}

bool Blocks::take(const BlockAddress& address) {
  if (!has(address)) return false;
  File& file = files_[address.block_class][address.file];
  std::uint64_t& word = file.taken[address.index / word_bits];
  const std::uint64_t bit = std::uint64_t{1} << (address.index % word_bits);
  if (word & bit) return false;
  word |= bit;
  --file.free;
  taken_bytes_ += stride_bytes(address.block_class);
  return true;
}

void Blocks::release(const BlockAddress& address) {
  File& file = files_[address.block_class][address.file];
  file.taken[address.index / word_bits] &= ~(std::uint64_t{1} << (address.index % word_bits));
  ++file.free;
  taken_bytes_ -= stride_bytes(address.block_class);
  first_free_[address.block_class] = std::min<std::size_t>(first_free_[address.block_class], address.file);
}

bool Blocks::may_grow(std::uint64_t bytes) const {
  if (limits_.capacity_bytes != 0 && file_bytes_ + bytes > limits_.capacity_bytes) return false;
  const DiskSpace space = disk_.space();
  const double share = limits_.reserve * static_cast<double>(space.total_bytes);
  const double left = std::max(std::min(share, static_cast<double>(limits_.reserve_at_most_bytes)), static_cast<double>(limits_.least_free_bytes));
  return space.free_bytes >= bytes && static_cast<double>(space.free_bytes - bytes) >= left;
}

std::optional<Growth> Blocks::grow(int block_class) const {
  const auto& files = files_[block_class];
  const std::uint64_t stride = stride_bytes(block_class);
  const bool fresh = files.empty() || files.back().blocks == blocks_per_file(block_class);
  const std::uint32_t before = fresh ? 0 : files.back().blocks;
  Growth growth;
  growth.block_class = block_class;
  growth.blocks = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, limits_.group_bytes / stride));
  growth.blocks = std::min(growth.blocks, blocks_per_file(block_class) - before);
  while (growth.blocks > 0 && !may_grow(growth.blocks * stride)) growth.blocks /= 2;
  if (growth.blocks == 0) return std::nullopt;
  if (fresh) {
    growth.created = disk_.create(name_of(block_class, files.size()));
    disk_.sync_directory();
  }
  DiskFile& file = fresh ? *growth.created : *files.back().file;
  try {
    file.allocate(before * stride, growth.blocks * stride);
  } catch (const DiskError& error) {
    if (error.error() != ENOSPC && error.error() != EDQUOT) throw;
    growth.blocks = 0;
  }
  return growth;
}

void Blocks::add(Growth growth) {
  auto& files = files_[growth.block_class];
  if (growth.created) files.emplace_back().file = std::move(growth.created);
  add_blocks(files.back(), growth.blocks);
  file_bytes_ += growth.blocks * std::uint64_t{stride_bytes(growth.block_class)};
  first_free_[growth.block_class] = std::min(first_free_[growth.block_class], files.size() - 1);
}

}  // namespace ff
