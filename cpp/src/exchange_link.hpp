// One connection between two ranks: what waits to be written, and what has been read so far. Never blocks.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "fireflyer/exchange_wire.hpp"

namespace ff {

inline constexpr std::int64_t grace_ns = 250'000'000;  // for whoever watches lives to explain a broken or refused connection

struct Flow;

struct OutFrame {
  ExchangeHeader header;
  std::string own;             // a payload that lies nowhere else
  const char* data = nullptr;  // or where it lies
  Flow* flow = nullptr;        // of which these bytes are
};

class ExchangeLink {
 public:
  ExchangeLink(int rank, int fd);  // owns the descriptor, also when it throws
  ~ExchangeLink();
  ExchangeLink(const ExchangeLink&) = delete;
  ExchangeLink& operator=(const ExchangeLink&) = delete;

  enum class Result { moved, blocked, broken };

  void push(OutFrame frame);        // seals its header, and its payload on connections between hosts
  bool pending() const { return !out.empty() || !streams.empty(); }
  Result write(std::size_t& bytes); // of the frame at the head; adds what was written
  bool written() const;             // the frame at the head has gone out
  Result read(std::size_t& bytes);  // adds what was read
  bool take_header();               // the next header is complete, in `header`
  bool take_payload();              // the payload of `header` is complete
  void expect(char* into);          // where the payload of `header` goes
  bool payload_is_sound() const { return local || header.size == 0 || crc_ == header.payload_crc; }
  bool read_was_short() const { return short_; }
  void shut();                      // closes the descriptor

  int rank;
  int fd;
  bool local;                       // a Unix socket
  pid_t pid = 0;                    // of the process at the other end, as this one sees it; 0 where it is not known
  bool broken = false;              // end of stream, or an error
  bool mute = false;                // cannot be written to any more
  std::deque<OutFrame> out;
  std::deque<Flow*> streams;        // whose bytes go out as segments when nothing else is to be written
  ExchangeHeader header;            // of the frame that is being read
  Flow* into_flow = nullptr;        // to which its payload belongs
  bool in_payload = false;
  std::array<char, max_hops * sizeof(ExchangeHop)> scratch;  // payloads that are no message

 private:
  std::size_t out_sent_ = 0;
  std::array<char, 4096> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  char* into_ = nullptr;
  std::size_t want_ = 0;
  std::uint32_t crc_ = 0;
  bool short_ = false;
};

// Copies from the memory of another process of this host. False where that is not permitted or the range is not mapped.
bool read_memory_of(pid_t pid, void* to, std::uint64_t address, std::size_t bytes);

}  // namespace ff
