#include "cold.hpp"

#include <algorithm>
#include <utility>

namespace ff {
namespace {

constexpr std::size_t piece_bytes = std::size_t{256} << 10;
constexpr std::size_t max_of_target = 64;  // reads; a disk's queue
constexpr int end_patience_ms = 5000;
static_assert(sizeof(TrailerHeader) + granules_of(max_block_bytes) * sizeof(std::uint32_t) <= piece_bytes);

}  // namespace

ColdReads::ColdReads(std::unique_ptr<Uring> ring) : ring_(std::move(ring)), memory_(piece_bytes) {}

ColdReads::~ColdReads() {
  for (auto& [target, line] : lines_) line.waiting.clear();
  for (auto& [address, job] : jobs_) job->next = job->end, job->then = nullptr;
  ring_->cancel_all();
  ring_->submit();
  while (!jobs_.empty() && ring_->wait(end_patience_ms)) take();
  // The kernel writes there when that disk wakes up.
  if (!jobs_.empty()) new std::vector<std::byte>(std::move(memory_));
}

void ColdReads::fetch(std::shared_ptr<ChunkTarget> target, std::shared_ptr<ChunkEngine::View> view, std::uint32_t from, std::uint32_t bytes, std::function<void()> then) {
  Line& line = lines_[target.get()];
  auto job = std::make_unique<Job>(Job{std::move(target), std::move(view), from, from + bytes, std::move(then)});
  if (line.under_way < max_of_target) end_if_done(begin(std::move(job)));
  else line.waiting.push_back(std::move(job));
}

ColdReads::Job* ColdReads::begin(std::unique_ptr<Job> job) {
  Job& one = *job;
  ++lines_[one.target.get()].under_way;
  jobs_[&one] = std::move(job);
  ask(one, one.view->trailer_offset(), sizeof(TrailerHeader) + granules_of(one.end) * sizeof(std::uint32_t));
  ask_piece(one);
  return &one;
}

void ColdReads::ask(Job& job, std::uint64_t offset, std::size_t bytes) {
  const auto queued = [&] { return ring_->read(job.view->file().descriptor(), offset, MutableBytes(memory_).first(bytes), reinterpret_cast<std::uint64_t>(&job)); };
  if (queued()) {
    ++job.under_way;
    return;
  }
  ring_->submit();
  if (queued()) ++job.under_way;  // else the kernel takes no more now, and who reads then waits for the disk
}

void ColdReads::ask_piece(Job& job) {
  const std::size_t bytes = std::min<std::size_t>(piece_bytes, job.end - job.next);
  if (bytes == 0) return;
  const std::uint32_t from = job.next;
  job.next += static_cast<std::uint32_t>(bytes);
  ask(job, job.view->offset() + from, bytes);
}

void ColdReads::came(Job& job) {
  --job.under_way;
  ask_piece(job);
  end_if_done(&job);
}

// And those that wait behind it, as long as the kernel takes nothing for them.
void ColdReads::end_if_done(Job* job) {
  while (job != nullptr && job->under_way == 0) {
    const auto done = std::move(jobs_.extract(job).mapped());
    job = nullptr;
    const auto line = lines_.find(done->target.get());
    --line->second.under_way;
    done->view.reset();
    if (done->then) done->then();
    if (!line->second.waiting.empty()) {
      auto next = std::move(line->second.waiting.front());
      line->second.waiting.pop_front();
      job = begin(std::move(next));
    } else if (line->second.under_way == 0) {
      lines_.erase(line);
    }
  }
}

void ColdReads::take() {
  // What the disk said is for who reads: here it only matters that it has said something.
  ring_->take([this](std::uint64_t tag, int) { came(*reinterpret_cast<Job*>(tag)); });
}

}  // namespace ff
