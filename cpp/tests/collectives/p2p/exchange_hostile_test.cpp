// A rank whose peer sends garbage: the error names the peer, and nothing crashes, hangs, or writes where it may not.
#include "exchange_group.hpp"

#include <cstring>
#include <functional>
#include <random>

using namespace exchange_test;
using ff::ExchangeFrame;
using H = ff::ExchangeHeader;

namespace {

constexpr std::size_t bytes = 400;
constexpr std::size_t long_bytes = 300'000;

void put(int fd, const void* data, std::size_t size) { CHECK(send(fd, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size)); }

// Rank 0 is real and waits for a message of `size` bytes; rank 1 is whatever `attack` does with its end.
ff::Failure under_attack(std::size_t size, const std::function<void(int)>& attack, bool tcp = true) {
  ff::Group group{0, {0, 1}, {"rank 0", "rank 1"}, {}, 3 * second};
  const int window_fd = ff::Window::create(1, 2, 4096);
  const ff::Window window(window_fd, -1);
  close(window_fd);
  ff::Exchange exchange(group, window, -1);
  const auto [mine, theirs] = tcp ? tcp_pair() : unix_pair();
  exchange.link(1, mine);
  std::vector<char> guarded(size + 128, 'g');
  const auto work = exchange.receive(1, guarded.data() + 64, size, ff::DType::f32, 0);
  attack(theirs);
  const ff::Failure failure = expect_failure(*work);
  close(theirs);
  exchange.close();
  for (std::size_t i = 0; i < 64; ++i) CHECK(guarded[i] == 'g' && guarded[64 + size + i] == 'g');
  return failure;
}

ff::OpDescriptor right_op(std::size_t size) { return {0, size / 4, ff::point_to_point, ff::DType::f32, 0}; }

H header_of(ExchangeFrame type, std::size_t size, const std::vector<char>& payload) {
  H header = ff::make_exchange_header(type, right_op(size), size);
  header.size = static_cast<std::uint32_t>(payload.size());
  header.payload_crc = 0;
  return header;
}

using Change = std::function<void(H&)>;

Change sealed(const Change& change) {
  return [change](H& header) {
    change(header);
    ff::seal(header);
  };
}

void a_changed_message_is_refused(const Change& change, ff::FailureKind kind, const std::string& words) {
  const ff::Failure failure = under_attack(
      bytes,
      [&](int fd) {
        const std::vector<char> payload(bytes, 'x');
        H header = header_of(ExchangeFrame::message, bytes, payload);
        ff::seal(header);
        change(header);
        put(fd, &header, sizeof header);
        put(fd, payload.data(), payload.size());
      },
      false);
  expect_words(failure, kind, kind == ff::FailureKind::mismatch ? -1 : 1, {words});
}

void headers() {
  const auto peer = ff::FailureKind::peer_failed;
  a_changed_message_is_refused([](H& h) { h.magic ^= 1; }, peer, "does not speak this protocol");
  a_changed_message_is_refused(sealed([](H& h) { h.version = 9; }), peer, "speaks version 9");
  a_changed_message_is_refused([](H& h) { h.bytes ^= 4; }, peer, "header with a wrong checksum");
  a_changed_message_is_refused(sealed([](H& h) { h.reserved = 1; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.dtype = 200; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.kind = 77; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.type = static_cast<ExchangeFrame>(99); }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.size = 0x7fffffff; }), peer, "too long");
  a_changed_message_is_refused(sealed([](H& h) { h.size = bytes - 4; }), peer, "out of order");
  a_changed_message_is_refused(sealed([](H& h) { h.number = 1; }), peer, "out of order");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::segment; }), peer, "out of order");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::offer; }), peer, "too long");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::answer; }), peer, "too long");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::question; }), peer, "out of order");  // not whole hops
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::go; h.size = 0; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::taken; h.size = 0; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::credit; h.size = 0; h.place = ~0ULL; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::refused; h.size = 0; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.type = ExchangeFrame::refused; h.size = 0; h.kind = 8; }), peer, "invalid");
  a_changed_message_is_refused(sealed([](H& h) { h.count = 7; }), ff::FailureKind::mismatch, "(7 f32");
  a_changed_message_is_refused(sealed([](H& h) { h.dtype = static_cast<std::uint8_t>(ff::DType::i32); }), ff::FailureKind::mismatch, "i32");
}

void damaged_bytes_are_noticed_between_hosts() {
  const ff::Failure failure = under_attack(bytes, [&](int fd) {
    const std::vector<char> payload(bytes, 'x');
    H header = header_of(ExchangeFrame::message, bytes, payload);
    header.payload_crc = 12345;
    ff::seal(header);
    put(fd, &header, sizeof header);
    put(fd, payload.data(), payload.size());
  });
  expect_words(failure, ff::FailureKind::corruption, 1, {"wrong checksum"});
}

// A long message: offered well, then its segments are wrong.
void segments() {
  const auto attack = [](const Change& change, bool twice = false) {
    return under_attack(
        long_bytes,
        [&](int fd) {
          H offer = header_of(ExchangeFrame::offer, long_bytes, {});
          ff::seal(offer);
          put(fd, &offer, sizeof offer);
          const std::vector<char> payload(1000, 'x');
          H segment = header_of(ExchangeFrame::segment, long_bytes, payload);
          change(segment);
          ff::seal(segment);
          put(fd, &segment, sizeof segment);
          put(fd, payload.data(), payload.size());
          if (!twice) return;
          H again = header_of(ExchangeFrame::offer, long_bytes, {});
          ff::seal(again);
          put(fd, &again, sizeof again);
        },
        false);
  };
  const auto peer = ff::FailureKind::peer_failed;
  expect_words(attack([](H& h) { h.place = 8; }), peer, 1, {"out of order"});
  expect_words(attack([](H& h) { h.place = ~0ULL - 500; }), peer, 1, {"out of order"});
  expect_words(attack([](H& h) { h.size = 0; }), peer, 1, {"out of order"});
  expect_words(attack([](H& h) { h.number = 4; }), peer, 1, {"out of order"});
  expect_words(attack([](H& h) { h.size = ff::segment_bytes + 1; }), peer, 1, {"too long"});
  expect_words(attack([](H&) {}, true), peer, 1, {"out of order"});
}

// An offer whose address cannot be read is streamed instead; one that lies in no memory harms nobody.
void a_wild_address_is_not_believed() {
  const ff::Failure failure = under_attack(
      long_bytes,
      [](int fd) {
        const std::uint64_t token = 42;
        H hello = ff::make_exchange_header(ExchangeFrame::hello, ff::OpDescriptor{}, 0);
        hello.size = sizeof token;
        hello.place = reinterpret_cast<std::uintptr_t>(&token);
        ff::seal(hello);
        put(fd, &hello, sizeof hello);
        put(fd, &token, sizeof token);
        H offer = header_of(ExchangeFrame::offer, long_bytes, {});
        offer.place = 64;
        ff::seal(offer);
        put(fd, &offer, sizeof offer);
        H got{};
        do {
          CHECK(recv(fd, &got, sizeof got, MSG_WAITALL) == sizeof got);
          std::vector<char> rest(got.size);
          if (got.size > 0) CHECK(recv(fd, rest.data(), rest.size(), MSG_WAITALL) == static_cast<ssize_t>(rest.size()));
        } while (got.type != ExchangeFrame::go);
        CHECK(got.place == 0);
        shutdown(fd, SHUT_RDWR);
      },
      false);
  expect_words(failure, ff::FailureKind::peer_failed, 1, {"died"});
}

// Without permission a long message is streamed, though the sender says truly where it lies, and nobody learns addresses here.
void memory_is_not_read_where_that_is_forbidden() {
  const ff::Group group{0, {0, 1}, {"rank 0", "rank 1"}, {}, 3 * second};
  const int window_fd = ff::Window::create(1, 2, 4096);
  const ff::Window window(window_fd, -1);
  close(window_fd);
  ff::Exchange exchange(group, window, -1, nullptr, {}, false);
  const auto [mine, theirs] = unix_pair();
  exchange.link(1, mine);
  std::vector<char> message(long_bytes, 'm'), got(long_bytes);
  const auto work = exchange.receive(1, got.data(), got.size(), ff::DType::f32, 0);
  const auto sent = exchange.send(1, message.data(), message.size(), ff::DType::f32, 0);
  const std::uint64_t token = 42;
  H hello = ff::make_exchange_header(ExchangeFrame::hello, ff::OpDescriptor{}, 0);
  hello.size = sizeof token;
  hello.place = reinterpret_cast<std::uintptr_t>(&token);
  ff::seal(hello);
  put(theirs, &hello, sizeof hello);
  put(theirs, &token, sizeof token);
  H offer = header_of(ExchangeFrame::offer, long_bytes, {});
  offer.place = reinterpret_cast<std::uintptr_t>(message.data());
  ff::seal(offer);
  put(theirs, &offer, sizeof offer);
  H answer{};
  CHECK(recv(theirs, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer.type == ExchangeFrame::offer && answer.place == 0);
  CHECK(recv(theirs, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer.type == ExchangeFrame::go && answer.place == 0);
  shutdown(theirs, SHUT_RDWR);
  expect_words(expect_failure(*work), ff::FailureKind::peer_failed, 1, {"died"});
  close(theirs);
  exchange.close();
}

// Nine times 60 kB are more than a receiver keeps for a peer.
void unasked_messages_are_bounded() {
  const ff::Failure failure = under_attack(bytes, [](int fd) {
    std::vector<char> payload(60'000, 'x');
    for (std::uint64_t number = 0; number < 9; ++number) {
      ff::OpDescriptor op{1000 + number, 15'000, ff::OpKind::gather, ff::DType::f32, 0};
      H header = ff::make_exchange_header(ExchangeFrame::message, op, payload.size());
      header.size = static_cast<std::uint32_t>(payload.size());
      header.payload_crc = 0;
      ff::seal(header);
      if (send(fd, &header, sizeof header, MSG_NOSIGNAL) < 0 || send(fd, payload.data(), payload.size(), MSG_NOSIGNAL) < 0) return;
    } }, false);
  expect_words(failure, ff::FailureKind::peer_failed, 1, {"out of order"});
}

// A peer that asks and asks, and never reads: what it would be told is not kept for ever.
void unread_answers_are_bounded() {
  const ff::Failure failure = under_attack(
      bytes,
      [](int fd) {
        const int least = 1;
        CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &least, sizeof least) == 0);
        const timeval limit{1, 0};
        CHECK(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
        const ff::ExchangeHop hop{1, 0, 0, 0, 0};
        const std::vector<char> payload(reinterpret_cast<const char*>(&hop), reinterpret_cast<const char*>(&hop + 1));
        for (std::uint64_t asked = 0; asked < 20'000; ++asked) {  // their answers are 2 MB
          H question = header_of(ExchangeFrame::question, bytes, payload);
          question.bytes = asked;
          ff::seal(question);
          if (send(fd, &question, sizeof question, MSG_NOSIGNAL) < 0 || send(fd, payload.data(), payload.size(), MSG_NOSIGNAL) < 0) return;  // nobody reads any more
        }
      },
      false);
  expect_words(failure, ff::FailureKind::peer_failed, 1, {"rank 1 asks rank 0 for its state and does not read the answers"});
}

void silence_and_noise() {
  const auto peer = ff::FailureKind::peer_failed;
  expect_words(under_attack(bytes, [](int fd) { shutdown(fd, SHUT_RDWR); }), peer, 1, {"died"});
  expect_words(under_attack(bytes, [](int) {}), peer, 1, {"answered nothing"});
  std::mt19937 chance(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<unsigned char> noise(64 + chance() % 400);
    for (auto& byte : noise) byte = static_cast<unsigned char>(chance());
    CHECK(under_attack(bytes, [&](int fd) { put(fd, noise.data(), noise.size()); }).culprit == 1);
  }
}

}  // namespace

int main() {
  headers();
  damaged_bytes_are_noticed_between_hosts();
  segments();
  a_wild_address_is_not_believed();
  memory_is_not_read_where_that_is_forbidden();
  unasked_messages_are_bounded();
  unread_answers_are_bounded();
  silence_and_noise();
  std::puts("hostile rank: all well");
  return 0;
}
