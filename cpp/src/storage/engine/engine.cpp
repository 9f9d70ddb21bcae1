#include "fireflyer/storage/engine/engine.hpp"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/storage/engine/content.hpp"
#include "state.hpp"

namespace ff {

// ---------------------------------------------------------------------------------------------- records

ChunkStat ChunkEngine::State::stat_of(const ChunkRecord& record) const {
  const auto waiting = pending.find(record.id);
  return {record.committed, waiting == pending.end() ? Content{} : waiting->second};
}

std::optional<ChunkStat> ChunkEngine::State::stat(const ChunkId& chunk) const {
  const ChunkRecord* record = index.find(chunk);
  if (record == nullptr) return std::nullopt;
  return stat_of(*record);
}

Lsn ChunkEngine::State::record(const ChunkId& chunk, const ChunkStat& now, const std::optional<CompletionRecord>& request) {
  const bool gone = now.committed.state == ContentState::none && now.pending.state == ContentState::none;
  Entry entry;
  entry.kind = gone ? EntryKind::erase_chunk : EntryKind::put_chunk;
  entry.file = chunk.file, entry.index = chunk.index;
  entry.chunk = {now.committed, now.pending};
  if (request) entry.request = stored(*request);
  apply(entry);
  return add(entry);
}

ChunkEngine::ChunkEngine(std::unique_ptr<Disk> disk, const EngineOptions& options) : state_(std::make_unique<State>(std::move(disk), options)) {
  state_->recover();
}

ChunkEngine::~ChunkEngine() = default;

// May `update` be staged now? Returns what the chunk is.
ChunkStat ChunkEngine::State::check(const ChunkId& chunk, const Update& update) const {
  const ChunkStat now = stat(chunk).value_or(ChunkStat{});
  const bool whole = update.kind == UpdateKind::replace;
  if (staging.contains(chunk)) fail(EngineErrorKind::conflict, name_of(chunk) + " is being staged already");
  if (now.pending.state != ContentState::none && now.pending.id() == update.next) return now;
  if (now.pending.state != ContentState::none)
    fail(EngineErrorKind::conflict, name_of(chunk) + " has version " + name_of(now.pending.id()) + " pending; commit or drop it first");
  const ContentId base = now.committed.state == ContentState::data ? now.committed.id() : ContentId{};
  if (!whole && base != update.base)
    fail(EngineErrorKind::conflict, name_of(chunk) + " is at version " + name_of(base) + ", the update was made for " + name_of(update.base));
  if (index.size() >= options.max_chunks && index.find(chunk) == nullptr)
    fail(EngineErrorKind::no_space, "no space for the record of another chunk beside " + std::to_string(options.max_chunks) + "; remove files or add disks");
  if (update.next.version == 0 || (!whole && update.next == now.committed.id())) fail(EngineErrorKind::usage, "version " + name_of(update.next) + " was used before");
  return now;
}

// Asks the disk without the lock: who only looks at records does not wait for it.
std::optional<BlockAddress> ChunkEngine::State::grow_and_take(Lock& lock, int block_class) {
  lock.unlock();
  const std::lock_guard one_at_a_time(growing);
  lock.lock();
  if (const auto block = blocks.take(block_class)) return block;  // another one has grown meanwhile
  lock.unlock();
  std::optional<Growth> growth;
  std::exception_ptr failure;
  try {
    growth = blocks.grow(block_class);
  } catch (const DiskError&) {
    failure = std::current_exception();
  }
  lock.lock();
  if (failure) std::rethrow_exception(failure);
  if (growth) blocks.add(std::move(*growth));
  return blocks.take(block_class);
}

BlockAddress ChunkEngine::State::take_block(Lock& lock, std::uint64_t length) {
  const int block_class = class_of(length);
  std::optional<BlockAddress> block = blocks.take(block_class);
  if (!block) block = grow_and_take(lock, block_class);
  // Files of blocks do not shrink: where large ones were removed their blocks are all the space that there is.
  for (int larger = block_class + 1; !block && larger < block_classes; ++larger) block = blocks.take(larger);
  if (!block) fail(EngineErrorKind::no_space, "no space for a block of " + std::to_string(block_bytes(block_class)) + " bytes; remove files or add disks");
  return *block;
}

namespace {

// Whether the data will be whole granules of the content, so that theirs is joined from the checksums that these get anyway.
// At the end of old content, which only the record tells, it is not so.
bool checked_as_written(const Update& update) {
  if (update.data.empty()) return false;
  if (update.kind == UpdateKind::replace) return true;
  if (update.kind != UpdateKind::write || update.offset % granule_bytes != 0) return false;
  return update.base.version == 0 || update.data.size() % granule_bytes == 0;
}

void check_data(const Update& update) {
  if (update.data_crc && crc32c(0, update.data.data(), update.data.size()) != *update.data_crc) refuse_data();
}

}  // namespace

// Without the lock.
void ChunkEngine::State::write_block(ChunkEngine& engine, DiskFile& file, const ChunkId& chunk, const Update& update, std::uint32_t length, bool has_old,
                                     Content& content) const {
  const BlockAddress block = content.block();
  const auto old = has_old ? engine.view(chunk) : std::nullopt;
  const bool cut = update.kind == UpdateKind::truncate;
  const std::uint32_t offset = update.kind == UpdateKind::replace ? 0 : update.offset;
  write_content({file, Blocks::offset(block), block.block_class}, chunk, content, length, offset, cut ? Bytes{} : update.data,
                checked_as_written(update) ? update.data_crc : std::nullopt, old ? &*old : nullptr);
  // The disk begins while others are written, so that the sync has less to wait for.
  if (options.durable) file.write_back(Blocks::offset(block), stride_bytes(block.block_class));
}

// Writes the content to a new block; the lock is given up meanwhile, and the chunk stays what it is.
void ChunkEngine::State::write_staged(Lock& lock, ChunkEngine& engine, const ChunkId& chunk, const Update& update, std::uint32_t length, bool has_old,
                                      Content& content) {
  staging.insert(chunk);
  std::optional<BlockAddress> block;
  std::exception_ptr failure;
  try {
    block = take_block(lock, length);
    content.block_file = block->file, content.block_index = block->index, content.block_class = block->block_class;
    DiskFile& file = blocks.file(*block);
    lock.unlock();
    write_block(engine, file, chunk, update, length, has_old, content);
    lock.lock();
    touched.insert(&file);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  staging.erase(chunk);
  if (!failure) return;
  if (block) free_now(*block);
  try {
    std::rethrow_exception(failure);
  } catch (const DiskError& error) {
    if (error.no_space()) fail(EngineErrorKind::no_space, error.what());
    break_down(error);
  }
}

Content ChunkEngine::stage(const ChunkId& chunk, const Update& update, Lsn& lsn) {
  State& s = *state_;
  if (!checked_as_written(update)) check_data(update);
  State::Lock lock(s.mutex);
  s.check_usable();
  const ChunkStat before = s.check(chunk, update);
  if (before.pending.state != ContentState::none && before.pending.id() == update.next) {
    lsn = s.last;  // its entry is among those that are known by now
    lock.unlock();
    if (checked_as_written(update)) check_data(update);
    return before.pending;
  }
  const bool has_old = before.committed.state == ContentState::data && update.kind != UpdateKind::replace;
  const std::uint64_t old_length = has_old ? before.committed.length : 0, end = std::uint64_t{update.offset} + update.data.size();
  Content content;
  content.version = update.next.version, content.made_in = update.next.made_in;
  content.state = ContentState::removed;
  if (update.kind != UpdateKind::remove) {
    if (s.cramped) fail(EngineErrorKind::no_space, "no space for more journal; free some on the disk");
    std::uint64_t length = std::max(old_length, end);
    if (update.kind == UpdateKind::truncate) length = update.length;
    if (update.kind == UpdateKind::replace) length = update.data.size();
    if (length > max_block_bytes) fail(EngineErrorKind::usage, "a chunk of " + std::to_string(length) + " bytes exceeds the maximum of " + std::to_string(max_block_bytes));
    content.state = ContentState::data;
    if (length > 0) s.write_staged(lock, *this, chunk, update, static_cast<std::uint32_t>(length), has_old, content);
  }
  // The chunk is what it was: stage, commit and drop of a chunk that is being staged are refused.
  auto request = update.request ? std::optional(CompletionRecord{*update.request, chunk, update.next}) : std::nullopt;
  if (request && !s.replaces(*request)) request.reset();
  lsn = s.record(chunk, {before.committed, content}, request);
  return content;
}

// What the chunk is, if `content` is pending and nothing hinders that this ends.
ChunkStat ChunkEngine::State::to_finish(const ChunkId& chunk, const ContentId& content) const {
  check_usable();
  const auto now = stat(chunk);
  if (!now || now->pending.state == ContentState::none || now->pending.id() != content)
    fail(EngineErrorKind::conflict, name_of(chunk) + " has no version " + name_of(content) + " pending");
  return *now;
}

Lsn ChunkEngine::commit(const ChunkId& chunk, const ContentId& content) {
  State& s = *state_;
  const State::Lock lock(s.mutex);
  const ChunkStat now = s.to_finish(chunk, content);
  s.free_later(now.committed);
  return s.record(chunk, {now.pending.state == ContentState::removed ? Content{} : now.pending, Content{}});
}

Lsn ChunkEngine::drop(const ChunkId& chunk, const ContentId& content, const std::optional<CompletionRecord>& completion) {
  State& s = *state_;
  const State::Lock lock(s.mutex);
  const ChunkStat now = s.to_finish(chunk, content);
  s.free_later(now.pending);
  // A channel that has gone on to a later update keeps the record of that one.
  const auto last = completion ? s.requests.find({completion->request.client, completion->request.channel}) : s.requests.end();
  const bool later = last != s.requests.end() && last->second.request.sequence > completion->request.sequence;
  return s.record(chunk, {now.committed, Content{}}, later ? std::nullopt : completion);
}

Lsn ChunkEngine::adopt(const std::vector<CompletionRecord>& completions, bool reset) {
  State& s = *state_;
  const State::Lock lock(s.mutex);
  s.check_usable();
  const auto take = [&s](const Entry& entry) {
    s.apply(entry);
    s.add(entry);
  };
  if (reset) {
    Entry entry;
    entry.kind = EntryKind::erase_requests;
    take(entry);
  }
  for (const CompletionRecord& completion : completions)
    if (s.replaces(completion)) take(request_entry(completion));
  return s.last;
}

Lsn ChunkEngine::forget_client(std::uint64_t client) {
  State& s = *state_;
  const State::Lock lock(s.mutex);
  s.check_usable();
  Entry entry;
  entry.kind = EntryKind::erase_client;
  entry.file = client;
  s.apply(entry);
  return s.add(entry);
}

Lsn ChunkEngine::durable() const {
  const State::Lock lock(state_->mutex);
  return state_->durable;
}

// ---------------------------------------------------------------------------------------------- looking and reading

std::optional<ChunkStat> ChunkEngine::stat(const ChunkId& chunk) const {
  const State::Lock lock(state_->mutex);
  return state_->stat(chunk);
}

std::optional<CompletionRecord> ChunkEngine::request(std::uint64_t client, std::uint32_t channel) const {
  const State::Lock lock(state_->mutex);
  const auto found = state_->requests.find({client, channel});
  return found == state_->requests.end() ? std::nullopt : std::optional(found->second);
}

std::vector<CompletionRecord> ChunkEngine::requests(std::uint64_t client, std::uint32_t channel, std::size_t limit) const {
  const State::Lock lock(state_->mutex);
  std::vector<CompletionRecord> completions;
  for (auto at = state_->requests.lower_bound({client, channel}); at != state_->requests.end() && completions.size() < limit; ++at) completions.push_back(at->second);
  return completions;
}

std::vector<ChunkId> ChunkEngine::pending() const {
  const State::Lock lock(state_->mutex);
  std::vector<ChunkId> chunks;
  for (const auto& [chunk, content] : state_->pending) chunks.push_back(chunk);
  return chunks;
}

std::vector<std::pair<ChunkId, ChunkStat>> ChunkEngine::list(const ChunkId& from, const ChunkId& to, std::size_t limit) const {
  const State::Lock lock(state_->mutex);
  std::vector<std::pair<ChunkId, ChunkStat>> found;
  std::optional<ChunkId> next = from;
  while (next && found.size() < limit) {
    const ChunkRecord* record = state_->index.first_from(*next);
    if (record == nullptr || record->id >= to) break;
    found.emplace_back(record->id, state_->stat_of(*record));
    next = after(record->id);
  }
  return found;
}

std::optional<std::pair<ChunkId, ChunkStat>> ChunkEngine::last_before(const ChunkId& to) const {
  const State::Lock lock(state_->mutex);
  const ChunkRecord* record = state_->index.last_before(to);
  if (record == nullptr) return std::nullopt;
  return std::pair(record->id, state_->stat_of(*record));
}

ChunkEngine::View& ChunkEngine::View::operator=(View&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(chunk_, other.chunk_);
  std::swap(content_, other.content_);
  std::swap(file_, other.file_);
  std::swap(offset_, other.offset_);
  return *this;
}

ChunkEngine::View::~View() {
  if (engine_ == nullptr) return;
  State& s = *engine_->state_;
  const State::Lock lock(s.mutex);
  const BlockAddress block = content_.block();
  if (s.blocks.unpin(block) && s.unwanted.erase(block) > 0) s.blocks.release(block);
}

std::optional<ChunkEngine::View> ChunkEngine::pinned(const ChunkId& chunk, const Content& content) {
  if (content.state != ContentState::data) return std::nullopt;
  View view;
  view.chunk_ = chunk;
  view.content_ = content;
  if (!content.has_block()) return view;
  view.engine_ = this;
  view.file_ = &state_->blocks.file(content.block());
  view.offset_ = Blocks::offset(content.block());
  state_->blocks.pin(content.block());
  return view;
}

std::optional<ChunkEngine::View> ChunkEngine::view(const ChunkId& chunk, bool pending) {
  const State::Lock lock(state_->mutex);
  const auto now = state_->stat(chunk);
  if (!now) return std::nullopt;
  return pinned(chunk, pending && now->pending.state != ContentState::none ? now->pending : now->committed);
}

std::optional<ChunkEngine::View> ChunkEngine::view_committed(const ChunkId& chunk, bool& has_pending) {
  const State::Lock lock(state_->mutex);
  const auto now = state_->stat(chunk);
  has_pending = now && now->pending.state != ContentState::none;
  return now ? pinned(chunk, now->committed) : std::nullopt;
}

std::size_t ChunkEngine::read(const View& view, std::uint32_t offset, MutableBytes into) const {
  if (!view.content().has_block()) return 0;
  return read_content(view.file(), view.offset(), view.chunk(), view.content(), offset, into);
}

bool ChunkEngine::checksums(const View& view, std::uint32_t first, std::span<std::uint32_t> into, bool may_wait) const {
  if (first + into.size() > granules_of(view.content().length))
    fail(EngineErrorKind::usage, "granules are out of range in a content of " + std::to_string(view.content().length) + " bytes");
  if (into.empty()) return true;
  const auto read = [&](std::uint32_t from, std::span<std::uint32_t> line) {
    return read_checksums(view.file(), view.offset(), view.chunk(), view.content(), from, line, may_wait);
  };
  if (into.size() > ChecksumCache::line_granules) return read(first, into);
  return state_->checksums.get(view.chunk(), view.content(), first, into, read);
}

void ChunkEngine::verify(const ChunkId& chunk, const View& view) const {
  if (!view.content().has_block()) return;
  state_->checksums.forget(chunk, view.content());  // if what is kept is not what is on the disk, this is when it shows
  verify_content(FromDisk(view.file()), view.offset(), chunk, view.content());
}

EngineStats ChunkEngine::stats() const {
  const State& s = *state_;
  const State::Lock lock(s.mutex);
  constexpr std::size_t node_bytes = 48;  // of a map's node, beside what it holds
  const std::uint64_t pending_bytes = s.pending.size() * (sizeof(ChunkId) + sizeof(Content) + node_bytes);
  const std::uint64_t request_bytes = s.requests.size() * (sizeof(CompletionRecord) + 16 + node_bytes);
  return {s.index.size(), s.pending.size(), s.blocks.file_bytes(), s.blocks.taken_bytes(), s.journal_bytes(),
          s.index.memory_bytes() + pending_bytes + request_bytes, s.requests.size()};
}

}  // namespace ff
