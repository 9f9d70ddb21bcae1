// What a run is given: transfers as arrays, and which of them wait for which.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ff {

// All arrays that describe transfers; `*_starts` have one element more than there are transfers.
struct TransferArrays {
  std::span<const double> nbytes, delay_s, latency_s;
  std::span<const std::int64_t> flow_starts;  // of a transfer: flow_paths[flow_starts[t] .. flow_starts[t + 1]]
  std::span<const std::int64_t> flow_paths;   // -1: the flow has no path, and waits for one
  std::span<const double> flow_shares;        // of the bytes of the transfer
  std::span<const std::int64_t> after_starts;
  std::span<const std::int64_t> after;  // places of transfers

  // Throws std::invalid_argument for arrays that do not fit each other.
  void check(std::size_t paths) const;
};

class Dependencies {
 public:
  Dependencies() = default;
  explicit Dependencies(const TransferArrays& arrays);

  // Those that wait for nothing.
  std::vector<std::uint32_t> first() const;

  // Calls `begin` with each transfer that waited for this one last.
  template <class Begin>
  void finished(std::uint32_t transfer, Begin begin) {
    for (std::uint64_t at = starts_[transfer]; at < starts_[transfer + 1]; ++at) {
      if (--waits_[followers_[at]] == 0) begin(followers_[at]);
    }
  }

 private:
  std::vector<std::uint64_t> starts_;
  std::vector<std::uint32_t> followers_, waits_;
};

}  // namespace ff
