// One connection between two ranks: what waits to be written, and what has been read so far. Never blocks.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "fireflyer/collectives/p2p/wire.hpp"

namespace ff {

inline constexpr std::int64_t grace_ns = 250'000'000;  // for whoever watches lives to explain a broken or refused connection

// A peer asks once in a while about each message that does not move, and reads what is answered. One that asks for more than
// this without reading is broken.
inline constexpr std::size_t max_unread_answer_bytes = 64 * 1024;
inline constexpr std::size_t max_unread_answers = max_unread_answer_bytes / (sizeof(ExchangeHeader) + sizeof(ExchangeAnswer));
inline constexpr std::size_t max_queued_frames = 8192;  // on the way to a peer, before questions of others are passed on to it

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

  enum class Result {
    moved,
    blocked,
    broken
  };

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
  std::size_t unread_answers = 0;   // of those: to the peer's questions
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

}  // namespace ff
