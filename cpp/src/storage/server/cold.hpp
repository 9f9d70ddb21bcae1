// Brings what reads of one server thread wait for into the page cache: any number at once, and no thread for each.
//
//   fetch → (submit) → … → take: `then` is called
//
// What comes is thrown away: all of it goes to one piece of memory that nobody looks at. The pages are what is wanted. A
// disk that hangs holds up its own reads: each target has its own bound, and what is above it waits in its own line.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fireflyer/storage/server/target.hpp"
#include "uring.hpp"

namespace ff {

class ColdReads {
 public:
  explicit ColdReads(std::unique_ptr<Uring> ring);
  ~ColdReads();  // waits for the disk, but not for one that hangs
  ColdReads(const ColdReads&) = delete;
  ColdReads& operator=(const ColdReads&) = delete;

  int descriptor() const { return ring_->descriptor(); }
  // What the view holds of [from, from + bytes), and the checksums up to there. `then` is called by `take`.
  void fetch(std::shared_ptr<ChunkTarget> target, std::shared_ptr<ChunkEngine::View> view, std::uint32_t from, std::uint32_t bytes, std::function<void()> then);
  void submit() { ring_->submit(); }
  bool queued() const { return ring_->queued(); }  // the kernel did not take all; `submit` again, soon
  void take();

 private:
  struct Job {
    std::shared_ptr<ChunkTarget> target;  // outlives the view
    std::shared_ptr<ChunkEngine::View> view;
    std::uint32_t next, end;  // what is still to be asked for
    std::function<void()> then;
    int under_way = 0;
  };
  struct Line {
    std::size_t under_way = 0;
    std::deque<std::unique_ptr<Job>> waiting;
  };

  Job* begin(std::unique_ptr<Job> job);
  void ask(Job& job, std::uint64_t offset, std::size_t bytes);
  void ask_piece(Job& job);
  void came(Job& job);
  void end_if_done(Job* job);

  std::unique_ptr<Uring> ring_;
  std::vector<std::byte> memory_;
  std::unordered_map<const ChunkTarget*, Line> lines_;
  std::unordered_map<Job*, std::unique_ptr<Job>> jobs_;
};

}  // namespace ff
