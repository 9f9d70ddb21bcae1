// Opening an engine: what the snapshot and the journals say, and how much of the end of it is true.
#include <algorithm>

#include "fireflyer/storage/engine/content.hpp"
#include "state.hpp"

namespace ff {
namespace {

constexpr std::size_t piece_bytes = std::size_t{256} << 10;
constexpr std::size_t max_journals = 8;  // beside a snapshot; more are folded into a new one

// Whether the disk gives all of it, whatever it is.
bool readable(const DiskFile& file, const Content& content) {
  const std::uint64_t end = block_bytes(content.block_class) + trailer_bytes(content.block_class);
  std::vector<std::byte> piece(piece_bytes);
  try {
    for (std::uint64_t at = 0; at < end; at += piece.size())
      file.read_from_disk(Blocks::offset(content.block()) + at, MutableBytes(piece).first(std::min<std::uint64_t>(piece.size(), end - at)));
  } catch (const DiskError&) {
    return false;
  }
  return true;
}

}  // namespace

Entry follows_entry(std::uint32_t journal, std::uint64_t batches) {
  Entry entry;
  entry.kind = EntryKind::follows;
  entry.index = journal, entry.file = batches;
  return entry;
}

RequestEntry stored(const CompletionRecord& completion) {
  return {completion.request.client, completion.request.sequence, completion.chunk.file, completion.content.version, completion.request.channel, completion.chunk.index, completion.content.made_in, 0};
}

Entry request_entry(const CompletionRecord& completion) {
  Entry entry;
  entry.kind = EntryKind::put_request;
  entry.request = stored(completion);
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

bool ChunkEngine::State::replaces(const CompletionRecord& completion) const {
  const auto now = requests.find({completion.request.client, completion.request.channel});
  if (now == requests.end() || now->second.request.sequence != completion.request.sequence)
    return now == requests.end() || completion.request.sequence > now->second.request.sequence;
  return now->second.content.version == 0 || (completion.content.version != 0 && completion.content > now->second.content);
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
    if (!fits || !blocks.take(content.block())) fail(EngineErrorKind::damaged, name_of(chunk) + " has a block that does not exist or belongs to another chunk");
  };
  for_all([&](const ChunkRecord& record) { take(record.id, record.committed); });
  for (const auto& [chunk, content] : pending) take(chunk, content);
}

// How long journals were when they were left, as the first batch of a later one tells it. All of that was durable by then.
std::map<std::uint32_t, std::uint64_t> ChunkEngine::State::lengths_told(const std::vector<std::uint32_t>& numbers) {
  std::map<std::uint32_t, std::uint64_t> lengths;
  std::vector<Entry> entries;
  for (const std::uint32_t number : numbers) {
    BatchReader reader(*disk, journal_name(number), number);
    if (!reader.next(entries)) continue;
    for (const Entry& entry : entries) {
      if (entry.kind != EntryKind::follows) continue;
      const auto [told, fresh] = lengths.emplace(entry.index, entry.file);
      if (!fresh && told->second != entry.file && options.durable) fail(EngineErrorKind::damaged, journal_name(entry.index) + " is not what was written");
    }
  }
  return lengths;
}

// Did the content reach the disk that `group` leaves and that was not there before? What was replaced within the group does
// not count: its block may have another content by now.
bool ChunkEngine::State::arrived(const std::vector<Entry>& group) {
  std::map<ChunkId, ChunkEntry> left;
  for (const Entry& entry : group) {
    const ChunkId chunk{entry.file, entry.index};
    if (entry.kind == EntryKind::put_chunk) left[chunk] = entry.chunk;
    if (entry.kind == EntryKind::erase_chunk) left.erase(chunk);
  }
  std::vector<std::pair<ChunkId, Content>> fresh;
  std::set<DiskFile*> files;
  for (const auto& [chunk, now] : left) {
    const ChunkStat before = stat(chunk).value_or(ChunkStat{});
    const auto known = [](const Content& one, const Content& other) { return one.has_block() && one.block() == other.block() && one.id() == other.id(); };
    for (const Content& content : {now.committed, now.pending}) {
      if (!content.has_block() || known(before.committed, content) || known(before.pending, content)) continue;
      if (!blocks.has(content.block())) return false;
      fresh.emplace_back(chunk, content);
      files.insert(&blocks.file(content.block()));
    }
  }
  // The disk is asked, and not what a process that was killed, or whose sync failed, has left in memory.
  for (DiskFile* file : files) file->sync();
  for (const auto& [chunk, content] : fresh) {
    try {
      verify_content(FromDisk(blocks.file(content.block())), Blocks::offset(content.block()), chunk, content);
    } catch (const EngineError&) {
      if (readable(blocks.file(content.block()), content)) return false;
      // It may have arrived, and all of the group may have been reported.
      fail(EngineErrorKind::damaged, "the disk lost the last write of " + name_of(chunk) + ", and it is not known whether it was acknowledged");
    }
  }
  return true;
}

// Applies the batches of a journal, and returns how many. `length`: told by a later one; else the end must be found: behind
// the first `least` batches, a group that no later one calls durable counts if all of it is there, its content too.
std::uint64_t ChunkEngine::State::read_journal(std::uint32_t number, std::uint64_t least, std::optional<std::uint64_t> length, bool& doubted) {
  const std::string name = journal_name(number);
  BatchReader reader(*disk, name, number);
  if (options.durable) {
    // A process that was killed may have left what is only in the page cache. It is shown from now on, so it must stay.
    reader.file().sync();
    reader.file().forget(0, reader.file().size());  // after a sync that failed it has what the disk has not
  }
  std::vector<Entry> group, entries;
  std::uint64_t applied = 0;
  bool with_content = false;
  const auto apply_group = [&](std::uint64_t batches) {
    for (const Entry& entry : group) apply(entry);
    group.clear();
    with_content = false;
    applied = batches;
  };
  while (!length || reader.batches() < *length) {
    const std::uint64_t batch = reader.batches();
    const auto header = reader.next(entries);
    if (!header) break;
    if ((header->flags & batch_after_sync) || batch <= least) apply_group(batch);
    group.insert(group.end(), entries.begin(), entries.end());
    with_content = with_content || (header->flags & batch_with_content);
  }
  const bool shorter = reader.batches() < std::max(least, length.value_or(0));
  if (options.durable && (shorter || (!length && reader.lost()))) fail(EngineErrorKind::damaged, name + " is not what was written");
  old_bytes += reader.bytes();
  const bool doubt = with_content && !length && reader.batches() > least;
  if (!doubt || arrived(group)) apply_group(reader.batches());
  doubted = doubted || doubt;
  return applied;
}

// Returns how many batches the journal that stands beside it has at least.
std::uint64_t ChunkEngine::State::read_snapshot(std::uint32_t number) {
  BatchReader reader(*disk, snapshot_name(number), number);
  std::vector<Entry> entries;
  while (reader.next(entries))
    for (const Entry& entry : entries) {
      if (entry.kind == EntryKind::end) return entry.file;
      apply(entry);
    }
  fail(EngineErrorKind::damaged, snapshot_name(number) + " is incomplete");
}

void ChunkEngine::State::recover() {
  // A process that waited for no disk may have left content in memory only, whose records say nothing of it.
  if (options.durable) blocks.sync();
  const auto names = disk->list();
  const auto snapshots = numbers_of(names, "snapshot-");
  auto journals = numbers_of(names, "journal-");
  for (const std::string& name : names)
    if (name.ends_with(".new")) disk->remove(name);
  const std::uint32_t first = snapshots.empty() ? 0 : snapshots.back();
  const std::uint64_t least = snapshots.empty() ? 0 : read_snapshot(first);
  std::erase_if(journals, [first](std::uint32_t number) { return number < first; });
  const bool used = !snapshots.empty() || std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("blocks-"); });
  if (used && journals.empty()) fail(EngineErrorKind::damaged, journal_name(first) + " is missing");
  const auto lengths = lengths_told(journals);
  bool doubted = false;
  journal_number = first;
  for (const std::uint32_t number : journals) {
    if (number != journal_number) fail(EngineErrorKind::damaged, journal_name(journal_number) + " is missing");
    const auto told = lengths.find(number);
    const auto length = told == lengths.end() ? std::nullopt : std::optional(told->second);
    entries.push_back(follows_entry(number, read_journal(number, number == first ? least : 0, length, doubted)));
    ++journal_number;
  }
  take_blocks();
  journal = std::make_unique<BatchWriter>(*disk, journal_name(journal_number), journal_number);
  cramped = !journal->make_room(options.journal_step, options.journal_step);
  if (options.durable) journal->sync();
  // What was in doubt is not looked at again when its blocks have other content.
  if (doubted && !cramped) {
    Lock lock(mutex);
    flush_waiting(lock);
  }
  // At once: who ends soon each time, and never comes to flush anything, must not fill the disk with journals.
  if (journals.size() <= max_journals || cramped) return;
  try {
    take_snapshot();
  } catch (const EngineError& error) {
    if (error.kind() != EngineErrorKind::no_space) throw;
    snapshot_from = 0;
  } catch (const DiskError& error) {
    if (!error.no_space()) throw;
    snapshot_from = 0;
  }
}

}  // namespace ff
