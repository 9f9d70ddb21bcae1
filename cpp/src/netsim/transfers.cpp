#include "fireflyer/netsim/transfers.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace ff {
namespace {

void require(bool fits, const char* words) {
  if (!fits) throw std::invalid_argument(words);
}

void require_starts(std::span<const std::int64_t> starts, std::size_t rows, std::size_t entries) {
  require(starts.size() == rows + 1 && starts.front() == 0 && starts.back() == static_cast<std::int64_t>(entries), "starts are one for each row, and the end");
  require(std::is_sorted(starts.begin(), starts.end()), "starts do not decrease");
}

}  // namespace

void TransferArrays::check(std::size_t paths) const {
  constexpr std::size_t most = std::numeric_limits<std::uint32_t>::max();
  const std::size_t count = nbytes.size();
  require(delay_s.size() == count && latency_s.size() == count, "each transfer has a delay and a latency");
  require(flow_shares.size() == flow_paths.size(), "each flow has a share");
  require(count < most && flow_paths.size() < most && after.size() < most, "too many transfers");
  require_starts(flow_starts, count, flow_paths.size());
  require_starts(after_starts, count, after.size());
  for (const std::span<const double> amounts : {nbytes, delay_s, latency_s, flow_shares}) {
    require(std::ranges::all_of(amounts, [](double one) { return one >= 0 && std::isfinite(one); }), "bytes, times and shares are 0 or more, and finite");
  }
  for (const std::int64_t path : flow_paths) require(path >= -1 && path < static_cast<std::int64_t>(paths), "a flow uses a path that does not exist");
  for (const std::int64_t other : after) require(other >= 0 && other < static_cast<std::int64_t>(count), "a transfer is after one that does not exist");
}

Dependencies::Dependencies(const TransferArrays& arrays) {
  const std::size_t count = arrays.nbytes.size();
  starts_.assign(count + 1, 0);
  waits_.assign(count, 0);
  followers_.resize(arrays.after.size());
  for (const std::int64_t other : arrays.after) ++starts_[other + 1];
  for (std::size_t transfer = 0; transfer < count; ++transfer) starts_[transfer + 1] += starts_[transfer];
  std::vector<std::uint64_t> next(starts_.begin(), starts_.end());
  for (std::size_t transfer = 0; transfer < count; ++transfer) {
    waits_[transfer] = static_cast<std::uint32_t>(arrays.after_starts[transfer + 1] - arrays.after_starts[transfer]);
    for (std::int64_t at = arrays.after_starts[transfer]; at < arrays.after_starts[transfer + 1]; ++at) {
      followers_[next[arrays.after[at]]++] = static_cast<std::uint32_t>(transfer);
    }
  }
}

std::vector<std::uint32_t> Dependencies::first() const {
  std::vector<std::uint32_t> found;
  for (std::uint32_t transfer = 0; transfer < waits_.size(); ++transfer) {
    if (waits_[transfer] == 0) found.push_back(transfer);
  }
  return found;
}

}  // namespace ff
