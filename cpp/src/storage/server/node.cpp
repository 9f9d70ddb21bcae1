#include "fireflyer/storage/server/node.hpp"

#include <stdexcept>
#include <utility>

namespace ff {

ChunkNode::ChunkNode(int io_threads, int job_threads, std::size_t buffer_bytes, ColdBy cold_by, LinkPatience patience)
    : job_threads_(job_threads),
      events_(std::make_shared<EventQueue>()),
      pool_(BufferPool::create(buffer_bytes)),
      server_(std::make_shared<ChunkServer>(io_threads, events_, pool_, patience, cold_by)) {}

ChunkNode::~ChunkNode() { close(); }

std::shared_ptr<ChunkTarget> ChunkNode::open_target(std::uint64_t number, const std::string& directory, const EngineOptions& options) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::invalid_argument("the native storage node is closed");
    if (!targets_[number].expired()) throw std::invalid_argument("target " + std::to_string(number) + " is open already");
  }
  auto held = std::make_unique<DirectoryLock>(directory);
  const auto opened = std::make_shared<ChunkTarget>(number, real_disk(directory), options, job_threads_, events_, std::move(held));
  const std::lock_guard lock(mutex_);
  if (closed_) throw std::invalid_argument("the native storage node is closed");
  targets_[number] = opened;
  return opened;
}

std::shared_ptr<ChunkTarget> ChunkNode::target(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = targets_.find(number);
  auto open = found == targets_.end() ? nullptr : found->second.lock();
  if (!open) throw std::invalid_argument("target " + std::to_string(number) + " is not open");
  return open;
}

std::uint64_t ChunkNode::hold(SharedBuffer data) {
  if (!data) return 0;
  const std::lock_guard lock(mutex_);
  handles_[++last_handle_] = std::move(data);
  return last_handle_;
}

SharedBuffer ChunkNode::data(std::uint64_t handle) const {
  if (handle == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) throw std::invalid_argument("there is no handle " + std::to_string(handle) + "; was it released?");
  return found->second;
}

void ChunkNode::release(std::uint64_t handle) {
  SharedBuffer last;  // goes without the lock: others may be waiting for its memory
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return;
  last = std::move(found->second);
  handles_.erase(found);
}

void ChunkNode::send_content(std::uint64_t link, std::string body, ChunkTarget& target, const ChunkId& chunk, const ContentId& content) {
  target.load(chunk, content, pool_, [server = server_, link, body = std::move(body)](SharedBuffer data) { server->send(link, body, std::move(data)); });
}

NodeStats ChunkNode::stats() const {
  NodeStats stats{server_->stats(), pool_->used_bytes(), 0, events_->size()};
  const std::lock_guard lock(mutex_);
  stats.handles = handles_.size();
  return stats;
}

void ChunkNode::close() {
  std::map<std::uint64_t, std::weak_ptr<ChunkTarget>> targets;
  std::unordered_map<std::uint64_t, SharedBuffer> handles;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    targets.swap(targets_);
    handles.swap(handles_);
  }
  server_->close();
  for (const auto& [number, target] : targets) {
    const auto open = target.lock();
    if (!open) continue;
    try {
      open->close();
    } catch (const EngineError&) {  // who wants to know closes the target itself
    }
  }
}

}  // namespace ff
