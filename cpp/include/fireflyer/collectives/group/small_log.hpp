// Small operations that were over before anybody could have asked for them. They are many, and a record of one costs a few
// stores: the executor keeps them under its own lock. What goes on is in the Recorder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fireflyer/collectives/group/recorder.hpp"

namespace ff {

class SmallLog {
 public:
  explicit SmallLog(std::size_t capacity = 1024) : records_(capacity) {}

  void keep(const OpDescriptor& op, std::uint64_t bytes, std::uint64_t saturated, std::int64_t submitted_ns, std::int64_t finished_ns) {
    records_[at_] = {op, bytes, saturated, submitted_ns, finished_ns};
    if (++at_ == records_.size()) at_ = 0;
    ++kept_;
  }

  void add_to(Snapshot& shot) const;  // in the order in which all were called

 private:
  struct Record {
    OpDescriptor op;
    std::uint64_t bytes, saturated;
    std::int64_t submitted_ns, finished_ns;
  };

  std::vector<Record> records_;
  std::size_t at_ = 0;
  std::uint64_t kept_ = 0;
};

}  // namespace ff
