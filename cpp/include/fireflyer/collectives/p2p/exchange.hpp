// Bytes from rank to rank: send and receive, and the parts of an all_to_all, a gather and a scatter.
//
// One thread for each rank, started with its first connection. A connection carries frames both ways (wire.hpp)
// and always drains: what nobody has asked for yet is kept, up to a bound. All state is under one lock; a caller that
// posts a message writes it itself when the connection takes it at once, so that a short one needs no other thread.
//
// A receive meets the first message of its rank with its tag, in the order of the calls of each; one from any rank the
// first that is there, or comes, the ranks taking turns. Messages with other tags wait: short ones in the receiver's
// memory as far as the credit of the pair goes, all others with their senders, so that none holds up another. Parts of
// group operations meet by the operation's number. A message of another size or type than the receive that it meets
// ends both calls, and nothing else; a part that does not fit is a usage failure. Failures go through the node's window,
// as those of the executor do: the first one ends everything on every rank.
//
// Who is to blame when a message that a program waits for does not move for the group's timeout: its peer is asked, whose
// thread answers even while the program computes. Blamed is who computes instead of making its call, or does not answer.
// Who waits itself is not: the chain ends at another, or at the asker, and then the program has a deadlock. A message
// that nobody waits for may take as long as it likes.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fireflyer/collectives/group/group.hpp"
#include "fireflyer/collectives/group/peer_memory.hpp"
#include "fireflyer/collectives/group/recorder.hpp"
#include "fireflyer/collectives/group/window.hpp"
#include "fireflyer/collectives/p2p/wire.hpp"

namespace ff {

class ExchangeLink;
class Work;

// Bytes for a rank, or from it.
struct Part {
  int rank = 0;
  char* data = nullptr;
  std::uint64_t bytes = 0;
};

// A message, at either end, from its call until it is done.
struct Flow {
  int rank = 0;                       // the peer; of a receive from any rank any_rank, until it has met a message
  bool sends = false;
  bool from_any = false;
  bool met = false;                   // a receive: its message was announced
  std::uint64_t order = 0;            // of a point-to-point receive among those of this rank
  std::uint64_t number = 0;           // of the message among those that its sender sent to the receiver
  OpDescriptor op;                    // point to point: kind 0, seq counts the calls of this pair and direction, root is the tag
  char* data = nullptr;
  std::uint64_t bytes = 0;
  std::shared_ptr<Work> work;
  std::shared_ptr<std::size_t> left;  // flows that the work still waits for
  ExchangeLink* link = nullptr;       // on which it was offered
  bool offered = false;               // not sent as a whole
  bool going = false;                 // segments may come or go
  std::uint64_t address = 0;          // in the sender's memory, where it is read from there
  std::uint64_t moved = 0;
  std::int64_t moved_ns = 0;
  std::uint64_t question = 0;         // number of the last question about it
  std::int64_t asked_ns = 0;
  std::int64_t unanswered_ns = 0;     // since when there is no answer; 0 where there is one
  bool serious = false;               // the last question was
  std::optional<ExchangeAnswer> answer;  // to the last question
  Recorder::Entry entry;
  std::uint64_t cycle_question = 0;   // the last one that came back around
  int cycles = 0;
};

inline constexpr int any_rank = -1;

class Exchange {
 public:
  // Borrows all; its thread runs on `cpus`, where there are any. Messages between two ranks are recorded; parts of group operations are not, one by one.
  // Without `reads_memory` nobody's memory is read, nor anybody told where this rank's lies.
  Exchange(const Group& group, const Window& window, int leader_fd, Recorder* recorder = nullptr, std::vector<int> cpus = {}, bool reads_memory = true);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void link(int rank, int fd);  // a stream socket that leads there; owned from now on
  bool linked(int rank);

  // Memory must stay valid until the work is done. Throw std::length_error when too many are pending, std::logic_error
  // when closed.
  std::shared_ptr<Work> send(int to, const void* data, std::uint64_t bytes, DType dtype, std::int32_t tag);
  // From `any_rank` too: the work's `source` then says from whom.
  std::shared_ptr<Work> receive(int from, void* data, std::uint64_t bytes, DType dtype, std::int32_t tag);
  // This rank's messages of a group operation, one for each part.
  std::shared_ptr<Work> start(const OpDescriptor& op, const std::vector<Part>& out, const std::vector<Part>& in);

  void fail(int culprit, const std::string& text);  // ends the group: that rank is to blame
  std::uint64_t moved_bytes();                      // received and sent, of finished messages
  void close();    // finishes what is pending, says goodbye, joins the thread; idempotent
  void abandon();  // in the child of a fork; of no further use afterwards, must not be destroyed

 private:
  using Key = std::pair<bool, std::uint64_t>;  // a group operation's; number, or the order of a receive
  using Flows = std::map<Key, std::unique_ptr<Flow>>;
  using Tag = std::int32_t;
  template <class T>
  using ByTag = std::map<Tag, std::deque<T>>;  // without empty queues

  struct UnexpectedMessage {
    ExchangeHeader header;
    ExchangeLink* link = nullptr;
    std::unique_ptr<char[]> bytes;
    bool complete = false;
    Flow* claimed = nullptr;  // called for while its last bytes are on their way
    bool dropped = false;     // nobody wants it any more
  };

  struct Peer {
    std::vector<std::unique_ptr<ExchangeLink>> links;
    ExchangeLink* out = nullptr;             // which all messages take, so that they stay in order
    std::deque<Flow*> unsent;                // no connection yet
    std::uint64_t sent = 0, received = 0;    // calls of send and receive
    std::uint64_t arrived = 0;               // point-to-point messages announced
    Flows sends, receives;
    ByTag<Flow*> posted;                     // receives that have met no message, in the order of the calls
    std::map<std::uint64_t, Flow*> met;      // receives under way, by the number of their message
    std::map<Key, UnexpectedMessage> unexpected;  // what nobody has asked for yet; by the message's number
    ByTag<std::uint64_t> waiting;            // of those, what is claimed by nobody, in the order of the calls
    Flow* watched_send = nullptr;            // the calls whose progress is looked at
    Flow* watched_receive = nullptr;
    std::uint64_t any_question = 0;          // the last one about a receive from any rank
    std::int64_t any_asked_ns = 0;
    std::optional<ExchangeAnswer> any_answer;
    std::uint64_t credit = credit_bytes;     // of what the peer keeps for us
    std::uint64_t used = 0;                  // of what we keep for the peer, by its count
    std::uint64_t owed = 0;                  // of that, no longer kept: to be given back
    pid_t readable = 0;                      // its process, where its memory can be read
    std::shared_ptr<const Process> process;  // the same
    bool left = false;
    std::int64_t broken_ns = 0;
    std::map<int, std::uint64_t> forwarded;  // origin of a question: its number
  };

  static Key key_of(const OpDescriptor& op) { return {op.kind != point_to_point, op.seq}; }
  static Key key_of(const Flow& flow) { return flow.op.kind == point_to_point && !flow.sends ? Key{false, flow.order} : key_of(flow.op); }
  std::shared_ptr<Work> post(bool sends, int rank, char* data, std::uint64_t bytes, DType dtype, std::int32_t tag);
  void add(std::unique_ptr<Flow> flow);
  void announce(Peer& peer, Flow& flow);
  void match_part(Peer& peer, Flow& flow);
  void match_message(Flow& flow);
  Peer* next_sender(Tag tag);
  Flow* claim_receive(Peer& peer, Tag tag);
  void meet(int rank, Peer& peer, Flow& flow, ExchangeLink& link, const ExchangeHeader& header);
  bool begin_part(ExchangeLink& link, Peer& peer, const Key& key);
  bool keep(ExchangeLink& link, Peer& peer, const Key& key, bool dropped);
  void end_unexpected(Peer& peer, const Key& key);
  static Flow* receive_of(Peer& peer, const ExchangeHeader& header);
  void refuse(Flow& flow, ExchangeLink& link, const ExchangeHeader& header);
  void end_refused(Flow& flow, const ExchangeHeader& header);
  void attach(Peer& peer, Flow& flow, ExchangeLink& link, const ExchangeHeader& header);
  bool fits(const Flow& flow, const ExchangeHeader& header);
  void finish(Flow& flow, const Failure& failure = {});
  void settle();
  void check_open();
  void check_rank(int rank) const;
  void give_credit(Peer& peer, std::uint64_t bytes);

  void start();
  void loop();
  void sleep(std::unique_lock<std::mutex>& lock);
  void wake();
  void read(ExchangeLink& link);
  void flush(ExchangeLink& link);
  bool next_segment(ExchangeLink& link);
  void pull();
  bool begin_frame(ExchangeLink& link);
  bool begin_message(ExchangeLink& link);
  bool begin_segment(ExchangeLink& link);
  bool end_frame(ExchangeLink& link);
  void end_message(ExchangeLink& link);
  bool end_of_offer(ExchangeLink& link);
  void greet(ExchangeLink& link);

  void watch(std::int64_t now_ns);
  void watch_leader();
  void watch_peer(int rank, Peer& peer, std::int64_t now_ns);
  void watch_flow(Peer& peer, Flow& flow, std::int64_t now_ns);
  void judge(const Flow& flow, std::int64_t idle_ns);
  void ask(Peer& peer, Flow& flow, bool serious, std::int64_t now_ns);
  bool answer_question(ExchangeLink& link);
  bool take_answer(ExchangeLink& link);
  ExchangeAnswer answer_for(const Peer& peer, const ExchangeHeader& header);
  bool has_made_call(const Peer& peer, const ExchangeHeader& header) const;
  static std::uint64_t position(const Peer& peer, const Flow& flow);
  static ExchangeHeader question_about(const Peer& peer, const Flow& flow, std::uint64_t question, bool serious);
  std::string other_tags(const Flow& flow) const;
  void watch_any(std::int64_t now_ns);
  enum class Sender {
    gone,     // closed its communicator
    unknown,  // no connection, no answer yet
    active,   // its message may come
    waits,    // for this rank
    idle
  };
  Sender ask_sender(int rank, const Flow& flow, std::int64_t now_ns);
  Sender judge_sender(const ExchangeAnswer& answer) const;
  void pass_on(const ExchangeHeader& header, std::vector<ExchangeHop> hops);
  void close_cycle(const ExchangeHeader& header, const std::vector<ExchangeHop>& hops);
  const Flow* awaited_flow(std::int64_t now_ns);
  bool awaited(const Flow& flow, std::int64_t now_ns) const;
  std::vector<Flow*> heads(Peer& peer, std::int64_t now_ns);
  std::vector<Flows*> all_flows();
  bool inside_operation() const;
  void note_activity(std::int64_t now_ns);
  void fail_with(FailureKind kind, int culprit, std::uint64_t seq, const std::string& text);
  void farewell();
  void shut_descriptors();

  const Group& group_;
  const Window& window_;
  const int leader_fd_;
  Recorder* const recorder_;
  const std::vector<int> cpus_;
  const bool reads_memory_;
  const int local_;
  const std::int64_t period_ns_;        // between questions
  int wake_fd_ = -1;
  std::uint64_t token_ = 0;             // which a peer that can read this process's memory finds there

  std::mutex mutex_;
  std::condition_variable drained_;
  std::map<int, Peer> peers_;
  Flows any_;                            // receives from any rank that have met no message
  ByTag<Flow*> any_posted_;              // the same
  Flow* watched_any_ = nullptr;
  int turn_ = 0;                         // of the ranks, when a receive from any may choose
  std::uint64_t receives_ = 0;           // calls of receive, of any rank's messages
  std::uint64_t any_receives_ = 0;       // of those, from any rank
  std::deque<Flow*> pulls_;
  std::size_t pending_ = 0;
  std::optional<OpDescriptor> current_;  // the last group operation that was started here
  std::uint64_t questions_ = 0;
  std::uint64_t moved_bytes_ = 0;
  std::int64_t activity_ns_ = 0;         // when this rank last did something
  std::uint64_t footprint_ = 0;          // of its executor, then
  std::int64_t next_poll_ns_ = 0;
  std::int64_t looked_ns_ = 0;
  bool asleep_ = false;                  // the thread sleeps, or is about to, without a limit
  bool failing_ = false;                 // a failure is known: nothing is read or written any more
  bool closing_ = false, closed_ = false, stop_ = false;
  std::mutex close_mutex_;
  std::thread thread_;
};

std::string call_text(const Flow& flow);  // "recv #7 from rank 2 (100 f32, tag 0)"
ExchangeHeader header_for(ExchangeFrame type, const Flow& flow);  // about its message

}  // namespace ff
