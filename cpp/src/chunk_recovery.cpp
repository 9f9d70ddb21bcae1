// Opening, the journal and the snapshot of the engine.
#include <algorithm>
#include <exception>

#include "chunk_state.hpp"

namespace ff {
namespace {

constexpr std::size_t max_journals = 8;       // beside a snapshot; more are folded into a new one when the engine opens

Entry follows_entry(std::uint32_t journal, std::uint64_t batches) {
  Entry entry;
  entry.kind = EntryKind::follows;
  entry.index = journal, entry.file = batches;
  return entry;
}

}  // namespace

RequestEntry stored(const RequestRow& row) {
  return {row.request.client, row.request.sequence, row.chunk.file, row.content.version, row.request.channel, row.chunk.index, row.content.made_in, 0};
}

Entry request_entry(const RequestRow& row) {
  Entry entry;
  entry.kind = EntryKind::put_request;
  entry.request = stored(row);
  return entry;
}

std::optional<ChunkId> after(const ChunkId& chunk) {
  if (chunk.index != UINT32_MAX) return ChunkId{chunk.file, chunk.index + 1};
  if (chunk.file != UINT64_MAX) return ChunkId{chunk.file + 1, 0};
  return std::nullopt;
}

void ChunkEngine::State::keep_request(const RequestEntry& r) {
  if (r.sequence == 0) return;
  requests[{r.client, r.channel}] = {{r.client, r.sequence, r.channel}, {r.chunk_file, r.chunk_index}, {r.made_in, r.version}};
}

bool ChunkEngine::State::replaces(const RequestRow& row) const {
  const auto now = requests.find({row.request.client, row.request.channel});
  if (now == requests.end() || now->second.request.sequence != row.request.sequence)
    return now == requests.end() || row.request.sequence > now->second.request.sequence;
  return now->second.content.version == 0 || (row.content.version != 0 && row.content > now->second.content);
}

void ChunkEngine::State::apply(const Entry& entry) {
  const ChunkId chunk{entry.file, entry.index};
  switch (entry.kind) {
    case EntryKind::put_chunk:
      index.put({chunk, entry.chunk.committed});
      if (entry.chunk.pending.state == ContentState::none) pending.erase(chunk);
      else pending[chunk] = entry.chunk.pending;
      keep_request(entry.request);
      break;
    case EntryKind::erase_chunk:
      index.erase(chunk);
      pending.erase(chunk);
      keep_request(entry.request);
      break;
    case EntryKind::put_request: keep_request(entry.request); break;
    case EntryKind::erase_client: {
      const auto from = requests.lower_bound({entry.file, 0});
      requests.erase(from, requests.upper_bound({entry.file, UINT32_MAX}));
      break;
    }
    case EntryKind::erase_requests: requests.clear(); break;
    case EntryKind::follows:
    case EntryKind::end: break;
    default:
      fail(EngineErrorKind::damaged, "a journal has an entry of unknown kind " + std::to_string(static_cast<int>(entry.kind)) + "; was it written by a newer version?");
  }
}

void ChunkEngine::State::take_blocks() {
  const auto take = [this](const ChunkId& chunk, const Content& content) {
    if (!content.has_block()) return;
    const bool fits = content.block_class < block_classes && content.length <= block_bytes(content.block_class);
    if (!fits || !blocks.take(content.block())) fail(EngineErrorKind::damaged, name_of(chunk) + " has a block that is not there or belongs to another chunk");
  };
  for_all([&](const ChunkRecord& record) { take(record.id, record.committed); });
  for (const auto& [chunk, content] : pending) take(chunk, content);
}

void ChunkEngine::State::read_journals(const std::vector<std::uint32_t>& numbers, std::uint32_t first) {
  BatchesRead before{FileEnd::whole, 0};
  for (const std::uint32_t number : numbers) {
    const std::string name = journal_name(number);
    if (number != journal_number) fail(EngineErrorKind::damaged, journal_name(journal_number) + " is missing");
    const BatchesRead read = read_batches(*disk, name, number, [&](const Entry& entry) {
      // Every journal tells how long the one before was when it was found or left: what is missing there was durable.
      if (entry.kind == EntryKind::follows && entry.index + 1 == number && number != first && entry.file != before.batches && options.durable)
        fail(EngineErrorKind::damaged, journal_name(number - 1) + " is not what was written");
      apply(entry);
    });
    if (read.end == FileEnd::damaged && options.durable) fail(EngineErrorKind::damaged, name + " is not what was written");
    // A process that was killed may have left what is only in the page cache. It is shown from now on, so it must stay.
    const auto file = disk->open(name);
    if (options.durable) file->sync();
    journal_bytes += file->size();
    before = read;
    ++journal_number;
  }
  entries.push_back(follows_entry(journal_number - 1, before.batches));
}

void ChunkEngine::State::recover() {
  const auto names = disk->list();
  const auto snapshots = numbers_of(names, "snapshot-");
  auto journals = numbers_of(names, "journal-");
  for (const std::string& name : names)
    if (name.ends_with(".new")) disk->remove(name);
  const std::uint32_t first = snapshots.empty() ? 0 : snapshots.back();
  if (!snapshots.empty()) {
    bool ended = false;
    read_batches(*disk, snapshot_name(first), first, [&](const Entry& entry) {
      ended = ended || entry.kind == EntryKind::end;
      apply(entry);
    });
    if (!ended) fail(EngineErrorKind::damaged, snapshot_name(first) + " is not whole");
  }
  std::erase_if(journals, [first](std::uint32_t number) { return number < first; });
  const bool used = !snapshots.empty() || std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("blocks-"); });
  if (used && journals.empty()) fail(EngineErrorKind::damaged, journal_name(first) + " is missing");
  journal_number = first;
  read_journals(journals, first);
  take_blocks();
  journal = std::make_unique<BatchWriter>(*disk, journal_name(journal_number), journal_number);
  if (journals.size() > max_journals || journal_bytes > options.snapshot_bytes) take_snapshot();
}

// Writes what waits to `writer`, without the lock meanwhile. The caller has `flushing`.
Ticket ChunkEngine::State::flush_waiting(Lock& lock, BatchWriter& writer) {
  const auto batch = std::exchange(entries, {});
  const auto files = std::exchange(touched, {});
  const auto blocks_freed = std::exchange(freed, {});
  const Ticket ticket = last;
  lock.unlock();
  std::exception_ptr failure;
  try {
    // Content first: a record in the journal is a promise that its block can be read.
    if (options.durable)
      for (DiskFile* file : files) file->sync();
    writer.append(batch);
    if (options.durable) writer.sync();
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const DiskError& error) {
      break_down(error);
    }
  }
  durable = ticket;
  for (const BlockAddress& block : blocks_freed) free_now(block);
  return ticket;
}

Ticket ChunkEngine::flush() {
  State& s = *state_;
  const std::lock_guard flushing(s.flushing);
  State::Lock lock(s.mutex);
  s.check_usable();
  if (s.last == s.durable) return s.durable;
  const Ticket ticket = s.flush_waiting(lock, *s.journal);
  lock.unlock();
  if (s.journal_bytes + s.journal->bytes() <= s.options.snapshot_bytes) return ticket;
  try {
    s.take_snapshot();
  } catch (const DiskError& error) {
    lock.lock();
    s.break_down(error);
  }
  return ticket;
}

// The next records as they are now; `next` is where to go on, none at the end.
std::vector<Entry> ChunkEngine::State::next_records(std::optional<ChunkId>& next) const {
  std::vector<Entry> step;
  const ChunkRecord* record = nullptr;
  while (step.size() < options.snapshot_step && (record = next ? index.first_from(*next) : nullptr) != nullptr) {
    const ChunkStat now = stat_of(*record);
    Entry& entry = step.emplace_back();
    entry.kind = EntryKind::put_chunk;
    entry.file = record->id.file, entry.index = record->id.index;
    entry.chunk = {now.committed, now.pending};
    next = after(record->id);
  }
  if (record == nullptr) next.reset();
  return step;
}

// Writes all records while others change them. What changes meanwhile is in the new journal as well; entries say what is
// true, so it does not matter which of them the snapshot has seen. All that it can have seen is durable in that journal
// before the snapshot gets its name. The caller has `flushing`, or is the only one who knows the engine.
void ChunkEngine::State::take_snapshot() {
  const std::uint32_t number = journal_number + 1;
  auto fresh = std::make_unique<BatchWriter>(*disk, journal_name(number), number);
  const std::string name = snapshot_name(number) + ".new";
  BatchWriter writer(*disk, name, number);
  Lock lock(mutex);
  entries.insert(entries.begin(), follows_entry(journal_number, journal->batches()));
  for (std::optional<ChunkId> next = ChunkId{}; next;) {
    const auto step = next_records(next);
    lock.unlock();
    writer.append(step);
    lock.lock();
  }
  std::vector<Entry> rest;
  for (const auto& [key, row] : requests) rest.push_back(request_entry(row));
  rest.emplace_back().kind = EntryKind::end;
  flush_waiting(lock, *fresh);
  lock.unlock();
  writer.append(rest);
  writer.sync();
  disk->rename(name, snapshot_name(number));
  disk->sync_directory();
  lock.lock();
  journal = std::move(fresh);
  journal_number = number;
  journal_bytes = 0;
  lock.unlock();
  for (const std::string& old : disk->list()) {
    const auto journals = numbers_of({old}, "journal-"), snapshots = numbers_of({old}, "snapshot-");
    if ((!journals.empty() && journals[0] < number) || (!snapshots.empty() && snapshots[0] < number)) disk->remove(old);
  }
}

}  // namespace ff
