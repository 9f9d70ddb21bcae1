// All of a storage process that is not decided in Python: its links, its targets, and the data of messages by handles.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fireflyer/storage/server/events.hpp"
#include "fireflyer/storage/server/server.hpp"
#include "fireflyer/storage/server/target.hpp"

namespace ff {

struct NodeStats {
  ServerStats server;
  std::uint64_t buffer_bytes = 0, handles = 0, events = 0;
};

// Thread-safe. `open_target` and `close` may take long, nothing else does. Throws std::invalid_argument for what is not
// there and should be.
class ChunkNode {
 public:
  ChunkNode(int io_threads, int job_threads, std::size_t buffer_bytes, ColdBy cold_by = ColdBy::kernel, LinkPatience patience = {});
  ~ChunkNode();
  ChunkNode(const ChunkNode&) = delete;
  ChunkNode& operator=(const ChunkNode&) = delete;

  ChunkServer& server() { return *server_; }
  EventQueue& events() { return *events_; }

  std::shared_ptr<ChunkTarget> open_target(std::uint64_t number, const std::string& directory, const EngineOptions& options);
  std::shared_ptr<ChunkTarget> target(std::uint64_t number) const;

  // A handle holds data until it is released; stages and sends hold it as well, on their own account.
  std::uint64_t hold(SharedBuffer data);
  SharedBuffer data(std::uint64_t handle) const;  // nullptr for 0
  void release(std::uint64_t handle);

  // The content as payload, once it was read and verified.
  void send_content(std::uint64_t link, std::string body, ChunkTarget& target, const ChunkId& chunk, const ContentId& content);

  NodeStats stats() const;
  void close();  // links first, then targets

 private:
  const int job_threads_;
  const std::shared_ptr<EventQueue> events_;
  const std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<ChunkServer> server_;
  mutable std::mutex mutex_;  // of what follows
  std::map<std::uint64_t, std::weak_ptr<ChunkTarget>> targets_;
  std::unordered_map<std::uint64_t, SharedBuffer> handles_;
  std::uint64_t last_handle_ = 0;
  bool closed_ = false;
};

}  // namespace ff
