#include "ucx_fabric.hpp"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ff::ucx {
namespace {

constexpr unsigned message_id = 0;
constexpr int max_steps = 64;                         // of progress in one go
constexpr std::int64_t flush_ns = 200'000'000;        // for what is on its way at a kind end
constexpr std::int64_t close_ns = 1'000'000'000;      // for UCX to cancel what was under way

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

std::string because(const char* what, ucs_status_t status) { return std::string(what) + ": " + ucs_status_string(status); }

bool over(void* request) { return !request || ucp_request_check_status(request) != UCS_INPROGRESS; }

// Lets go of a request that is over.
ucs_status_t settle(void*& request) {
  if (!request) return UCS_OK;
  const ucs_status_t status = ucp_request_check_status(request);
  ucp_request_free(request);
  request = nullptr;
  return status;
}

// What UCX answered to a call: a request that goes on, or the end of it.
ucs_status_t started(ucs_status_ptr_t answer, void*& request) {
  if (UCS_PTR_IS_PTR(answer)) {
    request = answer;
    return UCS_INPROGRESS;
  }
  return UCS_PTR_STATUS(answer);
}

ucp_request_param_t host_memory(std::uint32_t flags) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.flags = flags;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(UcxFabric& fabric, Stream& stream) : fabric_(fabric), stream_(stream) {}
  std::ptrdiff_t send_some(const iovec* pieces, int count) override { return fabric_.send(stream_, pieces, count); }
  std::ptrdiff_t receive_some(void* into, std::size_t bytes) override { return fabric_.receive(stream_, into, bytes); }
  bool holds() const override { return stream_.offered > 0; }
  pollfd interest(bool, bool) const override { return {-1, 0, 0}; }  // the fabric's descriptor tells of all
  void close() override { stream_.failed = true; }

 private:
  UcxFabric& fabric_;
  Stream& stream_;
};

}  // namespace

std::string UcxFabric::open() {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return because("UCX refuses its environment (UCX_*)", status);
  // Nobody may write into this process's memory once it has given up an operation; so receivers fetch, senders never put.
  ucp_config_modify(config, "RNDV_SCHEME", "get_zcopy");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) return because("UCX finds no transport or device (see UCX_TLS and UCX_NET_DEVICES)", status);

  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context_, &worker, &worker_);
  if (status != UCS_OK) return because("UCX finds no transport that can wake up a waiting thread (see UCX_TLS and UCX_NET_DEVICES)", status);
  status = ucp_worker_get_efd(worker_, &descriptor_);
  if (status != UCS_OK) return because("UCX gives no event descriptor", status);

  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  status = ucp_worker_query(worker_, &attributes);
  if (status != UCS_OK) return because("UCX gives no worker address", status);
  address_.assign(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucp_worker_release_address(worker_, attributes.address);
  if (address_.size() > max_address_bytes) return "UCX's address has " + std::to_string(address_.size()) + " bytes; name fewer devices in UCX_NET_DEVICES";
  if (attributes.max_am_header < sizeof(Prefix) + max_head_bytes) return "UCX allows too short headers with this UCX_TLS";

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = message_id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = on_message;
  handler.arg = this;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  return status == UCS_OK ? "" : because("UCX accepts no messages", status);
}

std::string UcxFabric::meet(int node, const std::string& address, const Key& outgoing, const Key& incoming) {
  if (!worker_ || peers_.contains(node)) return "that node is connected already";
  if (address.empty() || address.size() > max_address_bytes) return "its address has " + std::to_string(address.size()) + " bytes";
  auto peer = std::make_unique<Peer>();
  peer->outgoing = outgoing;
  peer->incoming = incoming;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_error, peer.get()};
  ucs_status_t status = ucp_ep_create(worker_, &params, &peer->endpoint);
  if (status == UCS_ERR_UNREACHABLE) {
    peer->watched = false;
    params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
    status = ucp_ep_create(worker_, &params, &peer->endpoint);
  }
  if (status != UCS_OK) return ucs_status_string(status);
  peers_[node] = std::move(peer);
  return "";
}

std::unique_ptr<Transport> UcxFabric::transport(int node, int channel, int socket) {
  const auto peer = peers_.find(node);
  if (peer == peers_.end()) return nullptr;
  auto& stream = streams_[{node, channel, socket}];
  if (stream) return nullptr;
  stream = std::make_unique<Stream>();
  stream->peer = peer->second.get();
  stream->ack_head = {stream->peer->outgoing, static_cast<std::uint16_t>(channel), static_cast<std::uint16_t>(socket), MessageKind::acknowledgement, 0};
  return std::make_unique<UcxTransport>(*this, *stream);
}

std::ptrdiff_t UcxFabric::send(Stream& stream, const iovec* pieces, int count) {
  if (stream.offered > 0) {
    if (over(stream.sending)) {
      if (settle(stream.sending) != UCS_OK) stream.failed = true;
      if (!stream.failed && !stream.unacknowledged) return static_cast<std::ptrdiff_t>(std::exchange(stream.offered, 0));
    }
    return stream.broken() || !worker_ ? Transport::broken : 0;
  }
  if (stream.broken() || !worker_) return Transport::broken;
  const bool headed = pieces[0].iov_len <= max_head_bytes;
  const iovec data = headed ? (count > 1 ? pieces[1] : iovec{nullptr, 0}) : pieces[0];
  Prefix prefix = stream.ack_head;
  prefix.kind = MessageKind::frame;
  prefix.head_bytes = static_cast<std::uint16_t>(headed ? pieces[0].iov_len : 0);
  std::memcpy(stream.out_head.data(), &prefix, sizeof prefix);
  std::memcpy(stream.out_head.data() + sizeof prefix, pieces[0].iov_base, prefix.head_bytes);
  const bool is_short = data.iov_len <= max_short_bytes;
  const ucp_request_param_t param = host_memory(is_short ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV);
  const ucs_status_t status =
      started(ucp_am_send_nbx(stream.peer->endpoint, message_id, stream.out_head.data(), sizeof prefix + prefix.head_bytes, data.iov_base, data.iov_len, &param),
              stream.sending);
  if (status != UCS_OK && status != UCS_INPROGRESS) {
    stream.failed = true;
    return Transport::broken;
  }
  stream.offered = prefix.head_bytes + data.iov_len;
  stream.unacknowledged = is_short;
  return 0;  // a long one may be through, which the next call says
}

std::ptrdiff_t UcxFabric::receive(Stream& stream, void* into, std::size_t bytes) {
  if (stream.fetching) {
    if (!over(stream.fetching)) return 0;
    if (settle(stream.fetching) != UCS_OK) {
      stream.failed = true;
      return Transport::broken;
    }
    const std::size_t got = stream.waiting[stream.first].bytes;
    take_away(stream);
    return static_cast<std::ptrdiff_t>(got);
  }
  if (stream.count == 0 || !worker_) return stream.broken() || !worker_ ? Transport::broken : 0;
  Message& message = stream.waiting[stream.first];
  if (message.head_read < message.head_bytes) {
    const std::size_t part = std::min(bytes, message.head_bytes - message.head_read);
    std::memcpy(into, message.head.data() + message.head_read, part);
    message.head_read += part;
    if (message.head_read == message.head_bytes && message.bytes == 0) take_away(stream);
    return static_cast<std::ptrdiff_t>(part);
  }
  if (!message.fetchable) {
    const std::size_t part = std::min(bytes, message.bytes - message.read);
    std::memcpy(into, message.data.data() + message.read, part);
    message.read += part;
    if (message.read == message.bytes) take_away(stream);
    return static_cast<std::ptrdiff_t>(part);
  }
  if (bytes < message.bytes || stream.broken()) {  // it says other things in its header than it does
    stream.failed = true;
    return Transport::broken;
  }
  const ucp_request_param_t param = host_memory(0);
  const ucs_status_t status = started(ucp_am_recv_data_nbx(worker_, std::exchange(message.fetchable, nullptr), into, message.bytes, &param), stream.fetching);
  if (status == UCS_INPROGRESS) return 0;
  if (status != UCS_OK) {
    stream.failed = true;
    return Transport::broken;
  }
  const std::size_t got = message.bytes;
  take_away(stream);
  return static_cast<std::ptrdiff_t>(got);
}

void UcxFabric::take_away(Stream& stream) {
  stream.first = (stream.first + 1) % max_waiting;
  --stream.count;
  if (std::exchange(stream.ack_owed, false)) stream.ack_due = true;
}

ucs_status_t UcxFabric::on_message(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes, const ucp_am_recv_param_t* param) {
  Prefix prefix;
  if (head_bytes < sizeof prefix) return UCS_OK;
  std::memcpy(&prefix, head, sizeof prefix);
  if (prefix.head_bytes != head_bytes - sizeof prefix || prefix.head_bytes > max_head_bytes) return UCS_OK;
  const bool fetchable = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  return static_cast<UcxFabric*>(self)->accept(prefix, static_cast<const char*>(head) + sizeof prefix, data, bytes, fetchable);
}

ucs_status_t UcxFabric::accept(const Prefix& prefix, const char* head, void* data, std::size_t bytes, bool fetchable) {
  const auto sender = std::find_if(peers_.begin(), peers_.end(), [&](const auto& entry) { return entry.second->incoming == prefix.key; });
  if (sender == peers_.end()) return UCS_OK;
  const auto found = streams_.find({sender->first, prefix.channel, prefix.socket});
  if (found == streams_.end()) return UCS_OK;
  Stream& stream = *found->second;
  if (prefix.kind == MessageKind::acknowledgement) {
    stream.unacknowledged = false;
    return UCS_OK;
  }
  if (prefix.kind != MessageKind::frame || stream.count == max_waiting || (!fetchable && bytes > max_short_bytes) || prefix.head_bytes + bytes == 0) {
    stream.failed = true;
    return UCS_OK;
  }
  Message& message = stream.waiting[(stream.first + stream.count++) % max_waiting];
  message.head_bytes = prefix.head_bytes;
  message.head_read = message.read = 0;
  message.bytes = bytes;
  std::memcpy(message.head.data(), head, prefix.head_bytes);
  message.fetchable = fetchable ? data : nullptr;
  if (fetchable) return UCS_INPROGRESS;  // kept until it is fetched
  if (bytes > 0) std::memcpy(message.data.data(), data, bytes);
  (stream.count < max_waiting ? stream.ack_due : stream.ack_owed) = true;
  return UCS_OK;
}

void UcxFabric::on_error(void* peer, ucp_ep_h, ucs_status_t) { static_cast<Peer*>(peer)->lost = true; }

bool UcxFabric::acknowledge() {
  bool any = false;
  for (const auto& [key, stream] : streams_) {
    if (!over(stream->acking)) continue;
    settle(stream->acking);
    if (!stream->ack_due || stream->broken()) continue;
    const ucp_request_param_t param = host_memory(UCP_AM_SEND_FLAG_EAGER);
    const ucs_status_t status = started(ucp_am_send_nbx(stream->peer->endpoint, message_id, &stream->ack_head, sizeof stream->ack_head, nullptr, 0, &param), stream->acking);
    if (status != UCS_OK && status != UCS_INPROGRESS) stream->failed = true;
    stream->ack_due = false;
    any = true;
  }
  return any;
}

bool UcxFabric::progress() {
  if (!worker_) return false;
  bool any = false;
  for (int step = 0; step < max_steps && ucp_worker_progress(worker_) != 0; ++step) any = true;
  return acknowledge() || any;
}

bool UcxFabric::arm() { return !worker_ || ucp_worker_arm(worker_) == UCS_OK; }

bool UcxFabric::idle() const {
  const auto quiet = [](const auto& entry) {
    const Stream& stream = *entry.second;  // without a watch nobody tells whether a send will ever be over; a fetch always is
    return over(stream.fetching) && (!stream.peer->watched || (over(stream.sending) && over(stream.acking)));
  };
  return std::all_of(closing_.begin(), closing_.end(), over) && std::all_of(streams_.begin(), streams_.end(), quiet);
}

bool UcxFabric::drive_until(std::int64_t until_ns, bool (UcxFabric::*over)() const) {
  while (!(this->*over)()) {
    if (now_ns() > until_ns) return false;
    if (ucp_worker_progress(worker_) == 0) sched_yield();
  }
  return true;
}

void UcxFabric::reap() {
  for (void*& request : closing_) settle(request);
  closing_.clear();
  for (const auto& [key, stream] : streams_) {
    settle(stream->sending);
    settle(stream->fetching);
    settle(stream->acking);
  }
}

void UcxFabric::release_unread() {
  for (const auto& [key, stream] : streams_) {
    for (; stream->count > 0; --stream->count, stream->first = (stream->first + 1) % max_waiting) {
      Message& message = stream->waiting[stream->first];
      if (message.fetchable && !stream->peer->lost) ucp_am_data_release(worker_, message.fetchable);
      message.fetchable = nullptr;
    }
  }
}

void UcxFabric::close_endpoints() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (const auto& [node, peer] : peers_) {
    void* request = nullptr;
    if (peer->endpoint && peer->watched && started(ucp_ep_close_nbx(peer->endpoint, &param), request) == UCS_INPROGRESS) closing_.push_back(request);
    peer->endpoint = nullptr;
    peer->lost = true;
  }
}

void UcxFabric::close(bool kindly) {
  if (worker_) {
    if (kindly) {
      acknowledge();
      const ucp_request_param_t param{};
      void* request = nullptr;
      if (started(ucp_worker_flush_nbx(worker_, &param), request) == UCS_INPROGRESS) closing_.push_back(request);
      drive_until(now_ns() + flush_ns, &UcxFabric::idle);
    }
    release_unread();
    close_endpoints();
    const bool over = drive_until(now_ns() + close_ns, &UcxFabric::idle);
    if (over) reap();
    // Destroying the worker ends what devices still do. Shared memory does nothing when nobody drives it, but UCX would end
    // the process over a copy that is under way: then the worker stays as it is.
    if (over || std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->watched; })) {
      ucp_worker_destroy(worker_);
    } else {
      context_ = nullptr;
    }
  }
  worker_ = nullptr;
  descriptor_ = -1;
  if (context_) ucp_cleanup(context_);
  context_ = nullptr;
}

}  // namespace ff::ucx

extern "C" __attribute__((visibility("default"))) ff::Fabric* ff_open_ucx(std::string* why) {
  auto fabric = std::make_unique<ff::ucx::UcxFabric>();
  *why = fabric->open();
  return why->empty() ? fabric.release() : nullptr;
}
