#include "fireflyer/fuse/memory.hpp"

#include <cstdlib>
#include <new>

namespace ff {
namespace {

constexpr std::size_t block_bytes = std::size_t{1} << 20, page_bytes = 4096;
constexpr std::size_t least_block_bytes = block_bytes / 16;  // smaller ones are allocated for what they are
constexpr std::size_t most_spare = 32;

bool is_pooled(std::size_t size) { return size >= least_block_bytes && size <= block_bytes; }

std::byte* allocate(std::size_t size) {
  void* const made = std::aligned_alloc(page_bytes, (size + page_bytes - 1) / page_bytes * page_bytes);
  if (made == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(made);
}

}  // namespace

MemoryPool::~MemoryPool() {
  for (std::byte* const block : spare_blocks_) std::free(block);
  for (void* const buffer : spare_buffers_) std::free(buffer);
}

void MemoryPool::wait_for_room(std::size_t size) {
  std::unique_lock lock(mutex_);
  room_.wait(lock, [&] { return has_room(size); });
  out_bytes_ += size;
}

void MemoryPool::left(std::size_t size) {
  out_bytes_ -= size;
  room_.notify_all();
}

std::size_t MemoryPool::cost_of(std::size_t size) { return is_pooled(size) ? block_bytes : size; }

Memory MemoryPool::take(std::size_t size) {
  wait_for_room(cost_of(size));
  return taken(size);
}

std::optional<Memory> MemoryPool::try_take(std::size_t size) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_room(cost_of(size))) return std::nullopt;
    out_bytes_ += cost_of(size);
  }
  return taken(size);
}

// Its room is counted already.
Memory MemoryPool::taken(std::size_t size) {
  const bool pooled = is_pooled(size);
  const std::size_t taken = cost_of(size);
  std::byte* block = nullptr;
  if (pooled) {
    const std::lock_guard lock(mutex_);
    if (!spare_blocks_.empty()) block = spare_blocks_.back(), spare_blocks_.pop_back();
  }
  if (block == nullptr) block = allocate(taken > 0 ? taken : 1);
  const auto give_back = [pool = shared_from_this(), pooled, taken](std::byte* gone) {
    {
      const std::lock_guard lock(pool->mutex_);
      pool->left(taken);
      if (pooled && pool->spare_blocks_.size() < most_spare) pool->spare_blocks_.push_back(gone);
      else std::free(gone);
    }
    pool->tell_room();
  };
  return {std::shared_ptr<std::byte>(block, give_back), block, size};
}

Memory MemoryPool::adopt(void* buffer, std::byte* data, std::size_t size) {
  wait_for_room(block_bytes);
  const auto give_back = [pool = shared_from_this()](std::byte* gone) {
    pool->give_buffer(gone);
    {
      const std::lock_guard lock(pool->mutex_);
      pool->left(block_bytes);
    }
    pool->tell_room();
  };
  return {std::shared_ptr<std::byte>(static_cast<std::byte*>(buffer), give_back), data, size};
}

void MemoryPool::on_room(std::function<void()> call) {
  const std::unique_lock lock(tell_mutex_);
  tell_ = std::move(call);
}

void MemoryPool::tell_room() {
  const std::shared_lock lock(tell_mutex_);
  if (tell_) tell_();
}

void* MemoryPool::request_buffer() {
  const std::lock_guard lock(mutex_);
  if (spare_buffers_.empty()) return nullptr;
  void* const buffer = spare_buffers_.back();
  spare_buffers_.pop_back();
  return buffer;
}

void MemoryPool::give_buffer(void* buffer) {
  const std::lock_guard lock(mutex_);
  if (spare_buffers_.size() < most_spare) spare_buffers_.push_back(buffer);
  else std::free(buffer);
}

void MemoryPool::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  room_.notify_all();
}

}  // namespace ff
