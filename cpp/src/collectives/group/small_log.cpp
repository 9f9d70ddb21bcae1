#include "fireflyer/collectives/group/small_log.hpp"

#include <algorithm>

namespace ff {

void SmallLog::add_to(Snapshot& shot) const {
  if (kept_ == 0) return;
  const std::uint64_t total = kept_ + (shot.records.empty() ? 0 : shot.records.back().id + 1);
  const std::size_t held = std::min<std::uint64_t>(kept_, records_.size());
  for (std::size_t i = 0; i < held; ++i) {
    const Record& record = records_[(at_ + records_.size() - held + i) % records_.size()];
    RecordView view;
    view.op = record.op;
    view.bytes = record.bytes;
    view.path = Path::small;
    view.state = RecordState::done;
    view.submitted_ns = view.started_ns = record.submitted_ns;
    view.finished_ns = record.finished_ns;
    view.chunks = 1;
    view.saturated = record.saturated;
    shot.records.push_back(std::move(view));
    shot.submitted = std::max(shot.submitted, record.op.seq + 1);
    shot.finished = std::max(shot.finished, record.op.seq + 1);
  }
  auto& all = shot.records;
  std::stable_sort(all.begin(), all.end(), [](const RecordView& a, const RecordView& b) { return a.submitted_ns < b.submitted_ns; });
  for (std::size_t i = 0; i < all.size(); ++i) all[i].id = total - all.size() + i;
}

}  // namespace ff
