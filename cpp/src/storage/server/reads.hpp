// Answering one read: what the table allows, from the chunks of the target that it names.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "fireflyer/storage/server/server.hpp"
#include "fireflyer/storage/wire/outbox.hpp"

namespace ff {

// Of fences and rights, as their owner counts them. It goes on while the machine is suspended, as the clocks of others do.
std::int64_t fence_clock_ns();

using ReadTable = std::unordered_map<std::uint32_t, PublishedChain>;

struct ServerCounts {
  std::atomic<std::uint64_t> links = 0, reads = 0, fetched = 0, read_bytes = 0, refused = 0, messages = 0, dropped = 0, held_back = 0, stalled = 0;
};

// Which files a link may read. Thread-safe.
class ReadRights {
 public:
  void grant(std::uint64_t from, std::uint64_t to, std::int64_t until_ns);
  void trust() { trusted_ = true; }
  bool trusted() const { return trusted_; }
  bool allow(std::uint64_t file, std::int64_t now_ns) const;

 private:
  struct Range {
    std::uint64_t from, to;
    std::int64_t until_ns;
  };
  std::atomic<bool> trusted_ = false;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::int64_t> files_;
  std::vector<Range> ranges_;
};

// What answering costs at most, known before anything is looked up: bytes to be sent, and of these and of the records of the
// reply those that are held in memory until then.
struct ReadWeight {
  std::size_t bytes, held;
};
ReadWeight weight_of(const ReadRequest& request);

class ReadAnswers {
 public:
  // Has the view's content fetched, so that the request can be answered again; false: it cannot.
  using Fetch = std::function<bool(const ReadRequest&, const std::shared_ptr<ChunkTarget>&, std::shared_ptr<ChunkEngine::View>, std::uint32_t length)>;

  ReadAnswers(ServerCounts& counts, Fetch fetch) : counts_(counts), fetch_(std::move(fetch)) {}
  // `fetched`: it is answered now, whether or not that waits for the disk.
  void answer(const ReadRequest& request, const ReadTable& table, const ReadRights& rights, std::int64_t now_ns, bool fetched, Outbox& out);

 private:
  void read(const ReadRequest& request, const PublishedChain& chain, ReadReply& reply, bool fetched, Outbox& out);
  bool fetch(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view);
  bool send(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view, const ReadReply& reply, bool may_wait, Outbox& out);
  bool send_file(const ReadRequest& request, const PublishedChain& chain, ChunkEngine::View& view, const ReadReply& reply, bool may_wait, Outbox& out);
  bool load(ChunkEngine& engine, const ChunkEngine::View& view, std::uint32_t offset, MutableBytes data, std::span<std::uint32_t> checksums, bool may_wait);
  void refuse(ReadReply& reply, ReadStatus status, Outbox& out);

  ServerCounts& counts_;
  Fetch fetch_;
  std::vector<std::uint32_t> checksums_;
  std::vector<std::byte> scratch_;  // granules of which parts are sent
  std::array<std::byte, granule_bytes> tail_;
};

}  // namespace ff
