#include "fireflyer/storage/server/target.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <iterator>

#include "fireflyer/base/crc32c.hpp"

namespace ff {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds flush_delay{500};      // of what nobody waits for: commits, whose old blocks are then free
constexpr milliseconds memory_patience{200};  // then a content is not sent, and is asked for again
constexpr std::uint32_t least_verified_bytes = 64 << 10;  // what a chunk counts at least, however small: the disk has to seek
constexpr std::size_t list_step = 64, max_verified_chunks = 1 << 14, fetch_piece_bytes = std::size_t{256} << 10;

}  // namespace

const char* name_of(EngineErrorKind kind) {
  switch (kind) {
    case EngineErrorKind::usage: return "usage";
    case EngineErrorKind::conflict: return "conflict";
    case EngineErrorKind::no_space: return "no_space";
    case EngineErrorKind::damaged: return "damaged";
    case EngineErrorKind::failed: return "failed";
    case EngineErrorKind::hung: return "hung";
  }
  return "usage";
}

ChunkTarget::ChunkTarget(std::uint64_t number, std::unique_ptr<Disk> disk, const EngineOptions& options, int threads, std::shared_ptr<EventQueue> events,
                         std::unique_ptr<DirectoryLock> lock)
    : number_(number), lock_(std::move(lock)), disk_(*disk), engine_(std::move(disk), options), events_(std::move(events)),
      space_(disk_.space()), updates_(threads), reads_(threads), tidier_(1) {
  flusher_ = std::thread([this] { flush_what_waits(); });
}

ChunkTarget::~ChunkTarget() {
  if (!closed_.exchange(true)) end();
}

// Who waits for the disk here is another thread: if it waits for ever, it keeps this target with it.
void ChunkTarget::close(milliseconds patience) {
  if (closed_.exchange(true)) return;
  auto failure = std::make_shared<std::promise<std::string>>();
  std::future<std::string> ended = failure->get_future();
  std::thread closer([self = shared_from_this(), failure] { failure->set_value(self->end()); });
  if (ended.wait_for(patience) == std::future_status::timeout) {
    closer.detach();
    throw EngineError(EngineErrorKind::hung, "the disk of target " + std::to_string(number_) + " has not answered for " + std::to_string(patience.count()) +
                                                 " ms; until it does its directory is locked, and what was not acknowledged may be lost");
  }
  closer.join();
  if (const std::string why = ended.get(); !why.empty()) throw EngineError(EngineErrorKind::failed, why);
}

// Why not all of it is written; empty: it is.
std::string ChunkTarget::end() {
  reads_.close();
  updates_.close();
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  has_flush_.notify_all();
  flusher_.join();
  std::string why;
  try {
    engine_.end();
  } catch (const std::exception& error) {
    why = error.what();
  }
  tidier_.close();
  lock_.reset();
  return why;
}

std::size_t ChunkTarget::jobs() const {
  const std::lock_guard lock(mutex_);
  return updates_.waiting() + reads_.waiting() + waiting_.size();
}

// ---------------------------------------------------------------------------------------------- threads

// With relaxed durability too: what was told is in the page cache then, and outlives this process.
void ChunkTarget::tell_when_flushed(NodeEvent event, std::uint64_t job) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back({std::move(event), job});
  }
  has_flush_.notify_one();
}

void ChunkTarget::flush_later() {
  {
    const std::lock_guard lock(mutex_);
    if (flush_at_) return;
    flush_at_ = steady_clock::now() + flush_delay;
  }
  has_flush_.notify_one();
}

// False: there is no space for it, and it may be tried again.
bool ChunkTarget::flush_group(std::vector<Waiting>& group) {
  try {
    engine_.flush();
    for (Waiting& one : group) events_->put(std::move(one.event));
  } catch (const EngineError& error) {
    if (error.kind() == EngineErrorKind::no_space) return false;
    fail_group(group, error);
  } catch (const std::exception& error) {
    fail_group(group, error);
  }
  return true;
}

void ChunkTarget::fail_group(const std::vector<Waiting>& group, const std::exception& error) {
  disk_failed(error.what());
  for (const Waiting& one : group)
    if (std::holds_alternative<StagedEvent>(one.event)) stage_failed(one.job, name_of(EngineErrorKind::failed), error.what());
}

void ChunkTarget::flush_what_waits() {
  bool without_space = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto due = [&] { return stopped_ || (!waiting_.empty() && !without_space) || (flush_at_ && steady_clock::now() >= *flush_at_); };
    while (!due()) flush_at_ ? void(has_flush_.wait_until(lock, *flush_at_)) : has_flush_.wait(lock);
    if (stopped_ && (without_space || (waiting_.empty() && !flush_at_))) return;
    std::vector<Waiting> group;
    group.swap(waiting_);
    flush_at_.reset();
    lock.unlock();
    without_space = !flush_group(group);
    tidy();
    lock.lock();
    if (!without_space) continue;
    waiting_.insert(waiting_.begin(), std::make_move_iterator(group.begin()), std::make_move_iterator(group.end()));
    flush_at_ = steady_clock::now() + flush_delay;
  }
}

// In a thread of its own, so that no group waits for it.
void ChunkTarget::tidy() {
  if (!engine_.untidy() || tidying_.exchange(true)) return;
  tidier_.run([this] {
    try {
      engine_.tidy();
    } catch (const std::exception& error) {
      disk_failed(error.what());
    }
    tidying_ = false;
  });
}

DiskSpace ChunkTarget::space() {
  DiskSpace known;
  {
    const std::lock_guard lock(mutex_);
    known = space_;
    if (std::exchange(looking_, true)) return known;
  }
  reads_.run([this] {
    std::optional<DiskSpace> now;
    try {
      now = disk_.space();
    } catch (const DiskError&) {  // who writes will hear of it
    }
    const std::lock_guard lock(mutex_);
    space_ = now.value_or(space_);
    looking_ = false;
  });
  return known;
}

// ---------------------------------------------------------------------------------------------- updates

void ChunkTarget::stage_failed(std::uint64_t job, const std::string& kind, const std::string& message) {
  events_->put(StageFailedEvent{number_, job, kind, message});
}

void ChunkTarget::disk_failed(const std::string& message) {
  if (!failed_.exchange(true)) events_->put(DiskFailedEvent{number_, message});
}

void ChunkTarget::stage(StageJob job) {
  updates_.run([this, job = std::move(job)] { stage_now(job); });
}

// Blocks that are free after the next flush are asked for before space is refused.
Content ChunkTarget::stage_with_room(const StageJob& job, Lsn& lsn) {
  Update update = job.update;
  if (job.data) update.data = job.data->bytes();
  update.data_crc = job.crc;
  try {
    return engine_.stage(job.chunk, update, lsn);
  } catch (const EngineError& error) {
    if (error.kind() != EngineErrorKind::no_space) throw;
  }
  engine_.flush();
  return engine_.stage(job.chunk, update, lsn);
}

void ChunkTarget::stage_now(const StageJob& job) {
  const Bytes data = job.data ? Bytes(job.data->bytes()) : Bytes{};
  const auto bad = [&] { stage_failed(job.job, "bad_data", "the data do not match the length or checksum of the update"); };
  if (data.size() != job.bytes) return bad();
  try {
    Lsn lsn = 0;
    const Content content = stage_with_room(job, lsn);
    tell_when_flushed(StagedEvent{number_, job.job, content}, job.job);
  } catch (const EngineError& error) {
    if (error.kind() == EngineErrorKind::failed) disk_failed(error.what());
    const auto stat = engine_.stat(job.chunk);
    if (error.kind() == EngineErrorKind::damaged && stat) note_damage(job.chunk, stat->committed);
    // The engine looks at the data as it writes them, so that it may have found something else first.
    if (crc32c(0, data.data(), data.size()) != job.crc) return bad();
    stage_failed(job.job, name_of(error.kind()), error.what());
  } catch (const std::exception& error) {
    disk_failed(error.what());
    stage_failed(job.job, name_of(EngineErrorKind::failed), error.what());
  }
}

void ChunkTarget::commit(const ChunkId& chunk, const ContentId& content) {
  engine_.commit(chunk, content);
  {
    const auto stat = engine_.stat(chunk);
    const std::lock_guard lock(mutex_);
    const auto found = damaged_.find(chunk);
    if (found != damaged_.end() && !(stat && stat->committed.has_block() && stat->committed.block() == found->second)) damaged_.erase(found);
  }
  flush_later();
}

void ChunkTarget::drop(std::uint64_t job, const ChunkId& chunk, const ContentId& content, const std::optional<CompletionRecord>& completion) {
  engine_.drop(chunk, content, completion);
  if (job == 0) return flush_later();
  tell_when_flushed(DroppedEvent{number_, job}, job);
}

void ChunkTarget::adopt(std::uint64_t job, const std::vector<CompletionRecord>& completions, bool reset) {
  engine_.adopt(completions, reset);
  tell_when_flushed(AdoptedEvent{number_, job}, job);
}

void ChunkTarget::forget(std::uint64_t client) {
  engine_.forget_client(client);
  flush_later();
}

// ---------------------------------------------------------------------------------------------- content and damage

bool ChunkTarget::damaged(const ChunkId& chunk, const ChunkStat& stat) const {
  const std::lock_guard lock(mutex_);
  const auto found = damaged_.find(chunk);
  if (found == damaged_.end()) return false;
  const auto is = [&](const Content& content) { return content.has_block() && content.block() == found->second; };
  return is(stat.committed) || is(stat.pending);
}

void ChunkTarget::note_damage(const ChunkId& chunk, const Content& content) {
  const auto stat = engine_.stat(chunk);
  const auto is_still = [&](const Content& now) { return now.has_block() && now.id() == content.id() && now.block() == content.block(); };
  if (!stat || !(is_still(stat->committed) || is_still(stat->pending))) return;
  {
    const std::lock_guard lock(mutex_);
    const auto [at, added] = damaged_.try_emplace(chunk, content.block());
    if (!added && at->second == content.block()) return;
    at->second = content.block();
  }
  events_->put(DamageEvent{number_, chunk});
}

SharedBuffer ChunkTarget::load_now(const ChunkId& chunk, const ContentId& content, BufferPool& pool) {
  auto view = engine_.view(chunk);
  if (!view || view->content().id() != content) view = engine_.view(chunk, true);
  if (!view || view->content().id() != content) return nullptr;
  const std::uint32_t length = view->content().length;
  SharedBuffer buffer = pool.take_within(length, pool.services(), memory_patience);
  if (!buffer) return nullptr;
  try {
    engine_.read(*view, 0, buffer->bytes());
    if (crc32c(0, buffer->bytes().data(), length) == view->content().crc) return buffer;
  } catch (const EngineError&) {
  }
  note_damage(chunk, view->content());
  return nullptr;
}

void ChunkTarget::load(const ChunkId& chunk, const ContentId& content, std::shared_ptr<BufferPool> pool, std::function<void(SharedBuffer)> loaded) {
  reads_.run([this, chunk, content, pool = std::move(pool), loaded = std::move(loaded)] {
    if (SharedBuffer buffer = load_now(chunk, content, *pool)) loaded(std::move(buffer));
  });
}

bool ChunkTarget::fetch(std::shared_ptr<ChunkEngine::View> view, std::uint32_t from, std::uint32_t bytes, std::function<void()> then) {
  return reads_.run([view = std::move(view), from, bytes, then = std::move(then)]() mutable {
    std::vector<std::byte> scratch(std::min<std::size_t>(fetch_piece_bytes, bytes));
    try {
      for (std::uint32_t done = 0; done < bytes; done += static_cast<std::uint32_t>(scratch.size()))
        view->file().read(view->offset() + from + done, MutableBytes(scratch).first(std::min<std::size_t>(scratch.size(), bytes - done)));
      scratch.resize(trailer_bytes(view->content().block_class));
      view->file().read(view->trailer_offset(), scratch);
    } catch (const DiskError&) {  // the read itself will say so
    }
    view.reset();
    then();
  });
}

void ChunkTarget::verify(std::uint64_t job, std::optional<ChunkId> after, std::uint64_t limit_bytes) {
  updates_.run([this, job, after, limit_bytes] { verify_now(job, after, limit_bytes); });
}

void ChunkTarget::verify_now(std::uint64_t job, std::optional<ChunkId> after, std::uint64_t limit_bytes) {
  const ChunkId end{UINT64_MAX, UINT32_MAX};
  std::uint64_t bytes = 0, looked = 0;
  for (;;) {
    const ChunkId from = after ? ChunkId{after->index == UINT32_MAX ? after->file + 1 : after->file, after->index + 1} : ChunkId{};
    const auto chunks = engine_.list(from, end, list_step);
    for (const auto& [chunk, stat] : chunks) {
      if (bytes >= limit_bytes || looked++ == max_verified_chunks) return events_->put(VerifiedEvent{number_, job, after, bytes});
      after = chunk;
      const auto view = engine_.view(chunk);
      if (!view) continue;
      if (view->content().has_block()) bytes += std::max(view->content().length, least_verified_bytes);
      try {
        engine_.verify(chunk, *view);
      } catch (const EngineError&) {
        note_damage(chunk, view->content());
      }
    }
    if (chunks.size() < list_step) return events_->put(VerifiedEvent{number_, job, std::nullopt, bytes});
  }
}

}  // namespace ff
