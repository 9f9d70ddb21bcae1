// An authenticated rank that sends altered frames: the other one fails with an error that names it, or gets what was sent,
// and writes nowhere else. PROGRAM [FIRST COUNT] runs other seeds.
#include <fcntl.h>

#include <cstdio>
#include <cstring>

#include "exchange_group.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fuzz.hpp"

using namespace exchange_test;
using ff::ExchangeFrame;
using ff::ExchangeHeader;
using fuzz::Bytes;
using fuzz::Chance;

namespace {

constexpr std::size_t guard = 64;
constexpr char right = 'r', untouched = 'g';

// What a right sender of `size` bytes could send at some time, before anything is altered.
ExchangeHeader some_header(Chance& chance, std::size_t size) {
  const auto type = static_cast<ExchangeFrame>(1 + chance.below(10));
  const bool group_operation = chance.one_in(8);
  const ff::OpDescriptor op{0, size / 4, group_operation ? ff::OpKind::gather : ff::point_to_point, ff::DType::f32, 0};
  ExchangeHeader header = ff::make_exchange_header(type, op, size);
  switch (type) {
    case ExchangeFrame::hello: header.size = 8; break;
    case ExchangeFrame::message: header.size = static_cast<std::uint32_t>(std::min(size, ff::offer_bytes - 1)); break;
    case ExchangeFrame::segment: header.size = static_cast<std::uint32_t>(std::min(size, ff::segment_bytes)); break;
    case ExchangeFrame::question: header.size = static_cast<std::uint32_t>(sizeof(ff::ExchangeHop) * (1 + chance.below(3))); break;
    case ExchangeFrame::answer: header.size = sizeof(ff::ExchangeAnswer); break;
    default: break;
  }
  return header;
}

void alter(Chance& chance, ExchangeHeader& header) {
  switch (chance.below(11)) {
    case 0: return chance.alter(header.type);
    case 1: return chance.alter(header.dtype);
    case 2: return chance.alter(header.reduce);
    case 3: return chance.alter(header.number);
    case 4: return chance.alter(header.bytes);
    case 5: return chance.alter(header.count);
    case 6: return chance.alter(header.place);
    case 7: return chance.alter(header.kind);
    case 8: return chance.alter(header.root);
    case 9: return chance.alter(header.size);
    default: return chance.alter(header.payload_crc);
  }
}

Bytes frames(Chance& chance, std::size_t size) {
  Bytes all;
  for (std::uint64_t left = 1 + chance.below(8); left > 0; --left) {
    ExchangeHeader header = some_header(chance, size);
    Bytes payload(header.size, right);
    header.payload_crc = ff::crc32c(0, payload.data(), payload.size());
    for (std::uint64_t times = chance.below(3); times > 0; --times) alter(chance, header);
    ff::seal(header);
    if (chance.one_in(10)) chance.alter(header.header_crc);
    fuzz::append(all, header);
    all.insert(all.end(), payload.begin(), payload.end());
  }
  if (chance.one_in(5)) chance.damage(all);
  return all;
}

void round(std::uint64_t seed) {
  Chance chance(seed);
  const std::size_t size = chance.one_in(3) ? 300'000 : 400;
  const ff::Group group{0, {0, 1}, {"rank 0", "rank 1"}, {}, 20 * second};
  const int window_fd = ff::Window::create(1, 2, 4096);
  const ff::Window window(window_fd, -1);
  close(window_fd);
  ff::Exchange exchange(group, window, -1);
  const auto [mine, theirs] = chance.one_in(2) ? tcp_pair() : unix_pair();
  exchange.link(1, mine);
  Bytes into(size + 2 * guard, untouched), from(size, 's');
  const auto received = exchange.receive(1, into.data() + guard, size, ff::DType::f32, 0);
  const auto sent = exchange.send(1, from.data(), size, ff::DType::f32, 0);
  const Bytes attack = frames(chance, size);
  CHECK(fcntl(theirs, F_SETFL, O_NONBLOCK) == 0);
  std::size_t put = 0;
  for (int tries = 0; put < attack.size() && tries < 2000; ++tries) {  // it reads, or has ended, or waits for a rank that answers
    const ssize_t n = send(theirs, attack.data() + put, attack.size() - put, MSG_NOSIGNAL);
    if (n > 0) put += static_cast<std::size_t>(n);
    else if (n < 0 && errno != EAGAIN) break;
    else usleep(100);
  }
  shutdown(theirs, SHUT_RDWR);
  for (const auto& work : {received, sent}) {
    CHECK(work->wait(60 * second));
    const ff::Failure failure = work->failure();
    const bool own = failure.kind == ff::FailureKind::usage || failure.kind == ff::FailureKind::mismatch;  // of this call alone
    const bool named = failure.culprit == 1 || own;
    if (failure.kind != ff::FailureKind::none && !named) std::fprintf(stderr, "kind %d culprit %d: %s\n", static_cast<int>(failure.kind), failure.culprit, failure.text.c_str());
    CHECK(failure.kind == ff::FailureKind::none || named);
    CHECK(failure.text.find('\n') == std::string::npos);
  }
  if (received->failure().kind == ff::FailureKind::none) CHECK(std::all_of(into.begin() + guard, into.end() - guard, [](char byte) { return byte == right; }));
  close(theirs);
  exchange.close();
  for (std::size_t i = 0; i < guard; ++i) CHECK(into[i] == untouched && into[guard + size + i] == untouched);
}

}  // namespace

int main(int argc, char** argv) {
  const fuzz::Seeds seeds(argc, argv, 300);
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    std::fprintf(stderr, "\rseed %llu", static_cast<unsigned long long>(seed));
    round(seed);
  }
  std::puts("\naltered frames of a rank: all well");
  return 0;
}
