// What waits becomes durable; and the snapshot, which keeps the journal short.
//
// A group's entries and its content are synced at the same time: one wait of the disk instead of two. So a crash may leave
// entries whose content never arrived. Each batch says whether all before it, content included, was durable when it was
// written; for the group behind the last one that says so, whoever opens the engine looks at the content itself.
#include <exception>
#include <functional>
#include <future>
#include <memory>

#include "state.hpp"

namespace ff {
namespace {

// Its exception, if any, comes out of the future.
std::future<void> run_on(JobThreads& threads, const std::function<void()>& job) {
  auto task = std::make_shared<std::packaged_task<void()>>(job);
  threads.run([task] { (*task)(); });
  return task->get_future();
}

// A file that goes unless it is wanted in the end.
struct Unwanted {
  Disk& disk;
  std::string name;
  bool wanted = false;

  ~Unwanted() {
    if (wanted) return;
    try {
      disk.remove(name);
    } catch (const DiskError&) {  // it stays; whoever opens the engine next removes it
    }
  }
};

}  // namespace

// ---------------------------------------------------------------------------------------------- flush

void ChunkEngine::State::write_group(const std::vector<Entry>& group, const std::set<DiskFile*>& files) {
  journal->append(group, options.durable && !files.empty());
  if (!options.durable) return;
  const auto sync_content = [&files] {
    for (DiskFile* file : files) file->sync();
  };
  if (options.sync_beside && !files.empty()) {
    std::future<void> written = run_on(beside, [this] { journal->sync(); });
    std::exception_ptr failure;
    try {
      sync_content();
    } catch (...) {
      failure = std::current_exception();
    }
    written.wait();  // it uses what is here
    if (failure) std::rethrow_exception(failure);
    written.get();
  } else {
    journal->sync();
    sync_content();
  }
  journal->now_durable();
}

// Writes what waits, without the lock meanwhile. The caller has `flushing`.
void ChunkEngine::State::flush_waiting(Lock& lock) {
  auto group = std::exchange(entries, {});
  auto files = std::exchange(touched, {});
  auto replaced = std::exchange(freed, {});
  const Lsn lsn = last;
  lock.unlock();
  std::exception_ptr failure;
  bool room = false;
  try {
    room = journal->make_room(bytes_for(group.size()), options.journal_step);
    if (room) write_group(group, files);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      break_down(error);
    }
  }
  if (!room) {
    cramped = true;
    entries.insert(entries.begin(), group.begin(), group.end());
    touched.merge(files);
    freed.insert(freed.begin(), replaced.begin(), replaced.end());
    fail(EngineErrorKind::no_space, "no space for more journal; free some on the disk");
  }
  durable = lsn;
  new_bytes = journal->bytes();
  for (const BlockAddress& block : replaced) free_now(block);
}

// Says that nothing is in doubt, before it is told; and keeps some journal in hand, so that what needs no block is never
// refused for want of space. The caller has `flushing`.
void ChunkEngine::State::leave_in_order(Lock& lock) {
  lock.unlock();
  std::exception_ptr failure;
  bool room = false;
  try {
    if (options.durable) journal->mark();
    room = journal->make_room(options.journal_step / 2, options.journal_step);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  cramped = !room;
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    break_down(error);
  }
}

// Returns how many batches the journal has then; all of them are durable.
std::uint64_t ChunkEngine::State::flush_all() {
  const std::lock_guard one_at_a_time(flushing);
  Lock lock(mutex);
  check_usable();
  if (last != durable) flush_waiting(lock);
  leave_in_order(lock);
  return journal->batches();
}

Lsn ChunkEngine::flush() {
  state_->flush_all();
  return durable();
}

void ChunkEngine::end() {
  State& s = *state_;
  s.ending = true;
  const std::lock_guard tidying(s.tidying);
  flush();
}

// ---------------------------------------------------------------------------------------------- snapshot

bool ChunkEngine::untidy() const {
  const State& s = *state_;
  const State::Lock lock(s.mutex);
  return s.broken.empty() && s.journal_bytes() > s.snapshot_from;
}

void ChunkEngine::tidy() {
  State& s = *state_;
  const std::unique_lock tidying(s.tidying, std::try_to_lock);
  if (!tidying || s.ending || !untidy()) return;
  const auto later = [&s] {
    const State::Lock lock(s.mutex);
    s.snapshot_from = s.journal_bytes() + s.options.snapshot_bytes / 4;
  };
  try {
    s.take_snapshot();
  } catch (const std::exception& error) {
    const auto* const refused = dynamic_cast<const EngineError*>(&error);
    const auto* const disk = dynamic_cast<const DiskError*>(&error);
    if ((refused && refused->kind() == EngineErrorKind::no_space) || (disk && disk->no_space())) return later();
    const State::Lock lock(s.mutex);
    s.break_down(error);
  }
}

// What a snapshot takes, about.
std::uint64_t ChunkEngine::State::snapshot_bytes() const {
  const Lock lock(mutex);
  const std::size_t steps = index.size() / options.snapshot_step + 1;
  return steps * bytes_for(options.snapshot_step) + bytes_for(requests.size() + 1);
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

// What is flushed from now on goes to `fresh`.
void ChunkEngine::State::begin_journal(std::unique_ptr<BatchWriter> fresh) {
  const std::lock_guard nobody_writes(flushing);
  const Lock lock(mutex);
  check_usable();
  entries.insert(entries.begin(), follows_entry(journal_number, journal->batches()));
  old_bytes += std::exchange(new_bytes, 0);
  journal = std::move(fresh);
  ++journal_number;
}

// Writes all chunks, and returns the entries of the completion records.
std::vector<Entry> ChunkEngine::State::copy_records(BatchWriter& writer) {
  Lock lock(mutex);
  for (std::optional<ChunkId> next = ChunkId{}; next;) {
    const auto step = next_records(next);
    lock.unlock();
    writer.append(step, false);
    if (ending) return {};
    lock.lock();
  }
  std::vector<Entry> completions;
  for (const auto& [key, completion] : requests) completions.push_back(request_entry(completion));
  return completions;
}

// Writes all records while others change them. What changes meanwhile is in the new journal as well; entries say what is
// true, so it does not matter which of them the snapshot has seen. All that it can have seen is durable, with its content,
// before the snapshot gets its name. Until then the journals before are what counts, and if there is no space for a snapshot
// they go on doing so. The caller has `tidying`.
void ChunkEngine::State::take_snapshot() {
  const std::uint32_t number = journal_number + 1;
  const std::string unnamed = snapshot_name(number) + ".new";
  auto fresh = std::make_unique<BatchWriter>(*disk, journal_name(number), number);
  Unwanted empty_journal{*disk, journal_name(number)};
  BatchWriter writer(*disk, unnamed, number);
  Unwanted part{*disk, unnamed};
  if (!writer.reserve(snapshot_bytes()) || !fresh->make_room(options.journal_step, options.journal_step))
    fail(EngineErrorKind::no_space, "no space for a snapshot");
  if (options.durable) fresh->sync();
  begin_journal(std::move(fresh));
  empty_journal.wanted = true;
  std::vector<Entry> rest = copy_records(writer);
  if (ending) return;
  Entry& end = rest.emplace_back();
  end.kind = EntryKind::end;
  end.index = number;
  end.file = flush_all();
  writer.append(rest, false);
  writer.sync();
  disk->rename(unnamed, snapshot_name(number));
  part.wanted = true;
  disk->sync_directory();
  {
    const Lock lock(mutex);
    old_bytes = 0;
    snapshot_from = options.snapshot_bytes;
  }
  for (const std::string& old : disk->list()) {
    const auto journals = numbers_of({old}, "journal-"), snapshots = numbers_of({old}, "snapshot-");
    if ((!journals.empty() && journals[0] < number) || (!snapshots.empty() && snapshots[0] < number)) disk->remove(old);
  }
}

}  // namespace ff
