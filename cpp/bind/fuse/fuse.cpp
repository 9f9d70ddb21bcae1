// Python's view of a mount: take events, answer each by its number.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "fireflyer/fuse/session.hpp"

namespace nb = nanobind;

namespace {

// As `Attributes` in fireflyer.fs.mount.kernel, in this order.
enum AttributeField {
  at_inode,
  at_mode,
  at_links,
  at_uid,
  at_gid,
  at_device,
  at_size,
  at_atime,
  at_mtime,
  at_ctime,
  attribute_fields
};
constexpr blksize_t best_transfer_bytes = 128 << 10;
constexpr std::int64_t second_ns = 1'000'000'000;

std::int64_t integer(nb::handle tuple, Py_ssize_t place) {
  const long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), place));
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

timespec time_of(std::int64_t ns) {
  std::int64_t seconds = ns / second_ns, rest = ns % second_ns;
  if (rest < 0) rest += second_ns, --seconds;
  return {static_cast<time_t>(seconds), static_cast<long>(rest)};
}

struct stat stat_of(nb::handle given) {
  if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != attribute_fields) throw std::invalid_argument("attributes must be a tuple of 10 integers");
  struct stat made{};
  made.st_ino = static_cast<ino_t>(integer(given, at_inode));
  made.st_mode = static_cast<mode_t>(integer(given, at_mode));
  made.st_nlink = static_cast<nlink_t>(integer(given, at_links));
  made.st_uid = static_cast<uid_t>(integer(given, at_uid));
  made.st_gid = static_cast<gid_t>(integer(given, at_gid));
  made.st_rdev = static_cast<dev_t>(integer(given, at_device));
  made.st_size = integer(given, at_size);
  made.st_blocks = (made.st_size + 511) / 512;
  made.st_blksize = best_transfer_bytes;
  made.st_atim = time_of(integer(given, at_atime));
  made.st_mtim = time_of(integer(given, at_mtime));
  made.st_ctim = time_of(integer(given, at_ctime));
  return made;
}

// How long the kernel may keep them. A program that is set-user-id loses that when somebody writes to it: the kernel asks
// anew before each exec.
double kept_s(const struct stat& attributes, double valid_s) {
  const bool set_id = (attributes.st_mode & (S_ISUID | S_ISGID)) != 0;
  return S_ISREG(attributes.st_mode) && set_id ? 0 : valid_s;
}

fuse_entry_param entry_of(nb::handle attributes, double valid_s) {
  fuse_entry_param made{};
  made.attr = stat_of(attributes);
  made.ino = made.attr.st_ino;
  made.attr_timeout = kept_s(made.attr, valid_s);
  made.entry_timeout = valid_s;
  return made;
}

struct ToPython {
  nb::object operator()(std::int64_t value) const { return nb::int_(value); }
  nb::object operator()(std::uint64_t value) const { return nb::int_(value); }
  nb::object operator()(const std::string& value) const { return nb::bytes(value.data(), value.size()); }
  nb::object operator()(ff::Memory& value) const { return nb::cast(std::move(value)); }
};

nb::object caller_of(const ff::Caller& caller) {
  PyObject* const groups = PyTuple_New(static_cast<Py_ssize_t>(caller.groups.size()));
  if (groups == nullptr) throw nb::python_error();
  for (std::size_t i = 0; i < caller.groups.size(); ++i) PyTuple_SET_ITEM(groups, static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLong(caller.groups[i]));
  return nb::make_tuple(caller.uid, caller.gid, caller.pid, nb::steal(groups));
}

nb::list take(ff::FuseSession& session, std::size_t limit) {
  nb::list taken;
  for (ff::FuseEvent& event : session.events().take(limit)) {
    PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(event.arguments.size()));
    if (made == nullptr) throw nb::python_error();
    const nb::object arguments = nb::steal(made);
    for (std::size_t i = 0; i < event.arguments.size(); ++i)
      PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), std::visit(ToPython{}, event.arguments[i]).release().ptr());
    taken.append(nb::make_tuple(event.kind, event.number, event.inode, caller_of(event.caller), arguments));
  }
  return taken;
}

// ---------------------------------------------------------------------------------------------- answers

// What the kernel says to an answer is not ours: who asked may be gone.
void reply_error(ff::FuseSession& self, std::uint64_t number, int error) {
  const auto asked = self.answer(number);
  if (error != 0) self.counts().refused(error);
  fuse_reply_err(asked.request, error);
}

void reply_entry(ff::FuseSession& self, std::uint64_t number, nb::handle attributes, double valid_s) {
  const fuse_entry_param entry = entry_of(attributes, valid_s);
  fuse_reply_entry(self.answer(number).request, &entry);
}

void reply_attributes(ff::FuseSession& self, std::uint64_t number, nb::handle attributes, double valid_s) {
  const struct stat made = stat_of(attributes);
  fuse_reply_attr(self.answer(number).request, &made, kept_s(made, valid_s));
}

fuse_file_info opened(ff::FuseSession& self, std::uint64_t handle, bool keep_pages, bool direct, int fd) {
  fuse_file_info made{};
  made.fh = handle;
  made.keep_cache = keep_pages;
  made.direct_io = direct;
  if (fd >= 0) self.keep(handle, fd);
  return made;
}

void reply_open(ff::FuseSession& self, std::uint64_t number, std::uint64_t handle, bool keep_pages, bool direct, int fd) {
  const fuse_file_info made = opened(self, handle, keep_pages, direct, fd);
  fuse_reply_open(self.answer(number).request, &made);
}

void reply_create(ff::FuseSession& self, std::uint64_t number, nb::handle attributes, double valid_s, std::uint64_t handle, bool direct, int fd) {
  const fuse_entry_param entry = entry_of(attributes, valid_s);
  const fuse_file_info made = opened(self, handle, false, direct, fd);
  fuse_reply_create(self.answer(number).request, &entry, &made);
}

void reply_target(ff::FuseSession& self, std::uint64_t number, const nb::bytes& target) { fuse_reply_readlink(self.answer(number).request, target.c_str()); }

// A value that was asked for with a size: 0 asks how long it is.
void reply_value(ff::FuseSession& self, std::uint64_t number, const nb::bytes& value) {
  const auto asked = self.answer(number);
  if (asked.size == 0) fuse_reply_xattr(asked.request, value.size());
  else if (value.size() > asked.size) self.counts().refused(ERANGE), fuse_reply_err(asked.request, ERANGE);
  else fuse_reply_buf(asked.request, value.c_str(), value.size());
}

void reply_written(ff::FuseSession& self, std::uint64_t number, std::size_t count) {
  self.counts().written(count);
  fuse_reply_write(self.answer(number).request, count);
}

void reply_data(ff::FuseSession& self, std::uint64_t number, const ff::Memory& memory, std::size_t count) {
  if (count > memory.size) throw std::invalid_argument("the memory has " + std::to_string(memory.size) + " bytes, " + std::to_string(count) + " are to be returned");
  const auto asked = self.answer(number);
  self.counts().read(count);
  self.send(asked, memory, count);
}

// Entries (name, attributes) from place `first` on, as many as fit. The offset of each is `offset` and one more with each.
std::size_t reply_directory(ff::FuseSession& self, std::uint64_t number, const nb::list& entries, std::size_t first, std::uint64_t offset, bool plus, double valid_s) {
  const auto peeked = self.peek(number);
  if (!peeked) throw std::invalid_argument("request " + std::to_string(number) + " is not open");
  std::vector<char> made(std::min(peeked->size, ff::max_transfer_bytes));
  std::size_t used = 0, count = 0;
  for (std::size_t place = first; place < entries.size(); ++place, ++count) {
    const nb::handle entry = entries[place];
    if (!PyTuple_Check(entry.ptr()) || PyTuple_GET_SIZE(entry.ptr()) != 2) throw std::invalid_argument("an entry must be (name, attributes)");
    const char* const name = PyBytes_AsString(PyTuple_GET_ITEM(entry.ptr(), 0));
    if (name == nullptr) throw nb::python_error();
    fuse_entry_param param = entry_of(PyTuple_GET_ITEM(entry.ptr(), 1), valid_s);
    // "." and ".." are no lookups.
    if (std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0) param.ino = 0;
    const std::size_t room = made.size() - used;
    const auto behind = static_cast<off_t>(offset + count + 1);
    const std::size_t taken = plus ? fuse_add_direntry_plus(nullptr, made.data() + used, room, name, &param, behind)
                                   : fuse_add_direntry(nullptr, made.data() + used, room, name, &param.attr, behind);
    if (taken > room) break;
    used += taken;
  }
  fuse_reply_buf(self.answer(number).request, made.data(), used);
  return count;
}

void reply_space(ff::FuseSession& self, std::uint64_t number, std::uint64_t block_bytes, std::uint64_t blocks, std::uint64_t free_blocks, std::uint64_t files,
                 std::uint64_t free_files, std::uint64_t name_bytes) {
  struct statvfs made{};
  made.f_bsize = made.f_frsize = block_bytes;
  made.f_blocks = blocks, made.f_bfree = made.f_bavail = free_blocks;
  made.f_files = files, made.f_ffree = made.f_favail = free_files;
  made.f_namemax = name_bytes;
  fuse_reply_statfs(self.answer(number).request, &made);
}

void reply_lock(ff::FuseSession& self, std::uint64_t number, int kind, std::int64_t start, std::int64_t end, std::uint32_t process) {
  struct flock made{};
  made.l_type = static_cast<short>(kind);
  made.l_whence = SEEK_SET;
  made.l_start = start;
  made.l_len = end == INT64_MAX ? 0 : end - start;
  made.l_pid = static_cast<pid_t>(process);
  fuse_reply_lock(self.answer(number).request, &made);
}

void detach(const std::string& directory, bool lazy) {
  int failed = 0;
  {
    const nb::gil_scoped_release released;
    failed = ::umount2(directory.c_str(), lazy ? MNT_DETACH : 0) == 0 ? 0 : errno;
  }
  if (failed == 0) return;
  errno = failed;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, directory.c_str());
  throw nb::python_error();
}

// ---------------------------------------------------------------------------------------------- memory as a buffer

int get_buffer(PyObject* object, Py_buffer* view, int flags) {
  const ff::Memory& memory = *nb::inst_ptr<ff::Memory>(object);
  return PyBuffer_FillInfo(view, object, memory.data, static_cast<Py_ssize_t>(memory.size), 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)}, {0, nullptr}};

void bind_answers(nb::class_<ff::FuseSession>& session) {
  session.def("reply_error", &reply_error, nb::arg("number"), nb::arg("error"))
      .def("reply_entry", &reply_entry, nb::arg("number"), nb::arg("attributes"), nb::arg("valid_s"))
      .def("reply_attributes", &reply_attributes, nb::arg("number"), nb::arg("attributes"), nb::arg("valid_s"))
      .def("reply_open", &reply_open, nb::arg("number"), nb::arg("handle"), nb::kw_only(), nb::arg("keep_pages") = false, nb::arg("direct") = false, nb::arg("fd") = -1)
      .def("reply_create", &reply_create, nb::arg("number"), nb::arg("attributes"), nb::arg("valid_s"), nb::arg("handle"), nb::kw_only(), nb::arg("direct") = false,
           nb::arg("fd") = -1)
      .def("reply_target", &reply_target, nb::arg("number"), nb::arg("target"))
      .def("reply_value", &reply_value, nb::arg("number"), nb::arg("value"))
      .def("reply_written", &reply_written, nb::arg("number"), nb::arg("count"))
      .def("reply_data", &reply_data, nb::arg("number"), nb::arg("memory"), nb::arg("count"))
      .def("reply_directory", &reply_directory, nb::arg("number"), nb::arg("entries"), nb::arg("first"), nb::arg("offset"), nb::kw_only(), nb::arg("plus"),
           nb::arg("valid_s"))
      .def("reply_space", &reply_space, nb::arg("number"), nb::kw_only(), nb::arg("block_bytes"), nb::arg("blocks"), nb::arg("free_blocks"), nb::arg("files"),
           nb::arg("free_files"), nb::arg("name_bytes"))
      .def("reply_lock", &reply_lock, nb::arg("number"), nb::arg("kind"), nb::arg("start"), nb::arg("end"), nb::arg("process"));
}

nb::dict requests(ff::FuseSession& self) {
  std::map<std::string_view, std::uint64_t> found;
  for (std::size_t opcode = 0; opcode < ff::FuseCounts::opcodes; ++opcode)
    if (const std::uint64_t count = self.counts().requests[opcode].load()) found[ff::name_of_opcode(opcode)] += count;
  nb::dict made;
  for (const auto& [name, count] : found) made[nb::str(name.data(), name.size())] = count;
  return made;
}

nb::dict errors(ff::FuseSession& self) {
  nb::dict made;
  for (std::size_t error = 0; error < ff::FuseCounts::errnos; ++error)
    if (const std::uint64_t count = self.counts().errors[error].load()) made[nb::int_(error)] = count;
  return made;
}

}  // namespace

NB_MODULE(_fuse, m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ff::Memory>(m, "FuseMemory", nb::type_slots(memory_slots)).def("__len__", [](const ff::Memory& self) { return self.size; });
  nb::class_<ff::FuseSession> session(m, "FuseSession");
  session.def(nb::init<const std::string&, const std::vector<std::string>&>(), nb::arg("directory"), nb::arg("options"), Released())
      .def_prop_ro("event_fd", [](ff::FuseSession& self) { return self.events().descriptor(); })
      .def("start", &ff::FuseSession::start, nb::arg("threads"), Released())
      .def("take", &take, nb::arg("limit"))
      .def(
          "is_open", [](ff::FuseSession& self, std::uint64_t number) { return self.peek(number).has_value(); }, nb::arg("number"))
      .def("read_memory", &ff::FuseSession::read_memory, nb::arg("size"))
      .def_prop_ro_static("read_limit_bytes", [](nb::handle) { return ff::max_read_bytes; })
      .def_static("read_cost_bytes", &ff::MemoryPool::cost_of, nb::arg("size"))
      .def("forget_attributes", &ff::FuseSession::forget_attributes, nb::arg("inode"), Released())
      .def("forget_pages", &ff::FuseSession::forget_pages, nb::arg("inode"), Released())
      .def(
          "forget_entry",
          [](ff::FuseSession& self, std::uint64_t parent, const nb::bytes& name) {
            const std::string text(name.c_str(), name.size());
            const nb::gil_scoped_release released;
            self.forget_entry(parent, text);
          },
          nb::arg("parent"), nb::arg("name"))
      .def_prop_ro("requests", &requests)
      .def_prop_ro("errors", &errors)
      .def_prop_ro("read_bytes", [](ff::FuseSession& self) { return self.counts().read_bytes.load(); })
      .def_prop_ro("written_bytes", [](ff::FuseSession& self) { return self.counts().written_bytes.load(); })
      .def("stop", &ff::FuseSession::stop, Released())
      .def(
          "close",
          [](ff::FuseSession& self, bool unmount) {
            {
              const nb::gil_scoped_release released;
              self.end(unmount);
            }
            self.close();  // answers are given under the lock of the interpreter, so none is under way
          },
          nb::kw_only(), nb::arg("unmount"));
  bind_answers(session);
  m.def("detach", &detach, nb::arg("directory"), nb::kw_only(), nb::arg("lazy") = false);
}
