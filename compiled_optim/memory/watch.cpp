// Reads many tensors and their gradients in one call; addresses.py defines the constants and documents the functions. Torch's
// and Python's functions are declared here: torch's headers take seconds to compile, and Python's may be missing. Headers of
// the C++ library would double the remaining time.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

using Object = const char*;  // of the class c10::TensorImpl, or of its storage
using Handle = const Object*;  // at::Tensor: a pointer to such an object

extern "C" {
char* PyList_GetItem(char* list, int64_t index);
void* PyInterpreterState_Get();
void* PyInterpreterState_ThreadHead(void* interpreter);
void* PyThreadState_Next(void* thread);
char* PyCapsule_New(void* pointer, const char* name, void (*destructor)(char*));
void* PyCapsule_GetPointer(char* capsule, const char* name);
int PyObject_RichCompareBool(char* left, char* right, int operation);
char* PyObject_GetAttr(char* object, char* name);
char* PyUnicode_InternFromString(const char* name);
void PyErr_Clear();
void Py_IncRef(char* object);
void Py_DecRef(char* object);
extern char _Py_NoneStruct;
}

// Torch's functions are looked up in its library, which is loaded already: to link against it takes as long as to compile.
static const char* missing = nullptr;

template <class F>
static F* function(const char* name) {
  void* found = dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY), name);
  if (!found) missing = name;
  return reinterpret_cast<F*>(found);
}

static const auto delete_handle = function<int32_t(Handle)>("aoti_torch_delete_tensor_object");
static const auto new_handle = function<int32_t(Handle, Handle*)>("aoti_torch_new_tensor_handle");
static const auto new_alias = function<int32_t(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*)>(
    "aoti_torch__reinterpret_tensor");
static const auto data_ptr = function<int32_t(Handle, char**)>("aoti_torch_get_data_ptr");
static const auto device_index = function<int32_t(Handle, int32_t*)>("aoti_torch_get_device_index");
static const auto device_type = function<int32_t(Handle, int32_t*)>("aoti_torch_get_device_type");
static const auto dim_of = function<int32_t(Handle, int64_t*)>("aoti_torch_get_dim");
static const auto dtype_of = function<int32_t(Handle, int32_t*)>("aoti_torch_get_dtype");
static const auto numel_of = function<int32_t(Handle, int64_t*)>("aoti_torch_get_numel");
static const auto sizes_of = function<int32_t(Handle, int64_t**)>("aoti_torch_get_sizes");
static const auto strides_of = function<int32_t(Handle, int64_t**)>("aoti_torch_get_strides");
static const auto storage_offset = function<int32_t(Handle, int64_t*)>("aoti_torch_get_storage_offset");
static const auto storage_size = function<int32_t(Handle, int64_t*)>("aoti_torch_get_storage_size");
static const auto itemsize_of = function<size_t(int32_t)>("aoti_torch_dtype_element_size");
static const auto grad_of = function<Handle(Object)>("_ZNK3c1010TensorImpl4gradEv");
static const auto bump_version = function<void(Handle)>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");

extern "C" const char* missing_function() { return missing; }

static const int EQUAL = 2;  // Python's Py_EQ
static const int64_t BLOCK = 16;

struct Failed {};

template <class T>
static T ask(int32_t (*property)(Handle, T*), Handle t) {
  T found;
  if (property(t, &found)) throw Failed();
  return found;
}

struct Snapshot {  // of the address and form of a tensor, in its object and in its storage
  Object tensor = nullptr, storage;
  char form[KEYS_AT + 8 - FORM_AT], memory[NBYTES_AT + 8 - DATA_AT];
};

struct Form {  // a tensor as it was when the watch was made
  Handle object;
  const char* address;
  const int64_t* extents;  // sizes, then strides
  int64_t dim;
  int64_t numel;
  int64_t span;  // elements from the first to behind the last
  int64_t bytes;  // the same in bytes
  int32_t dtype, grad_dtype;
  Snapshot itself, gradient;  // at their last check in detail that passed
  int64_t found;  // the address of that gradient
};

struct Reference {
  char* object = nullptr;
  ~Reference() { Py_DecRef(object); }
  void hold(char* other) {
    Py_IncRef(other);
    Py_DecRef(object);
    object = other;
  }
};

struct Sharding {  // of DTensors whose local parts are watched; the parts of their gradients count as the parts' gradients
  char *kind, *kind_of_part;  // the classes
  int64_t class_at, local_at, spec_at;  // the offsets of attributes
  char* owners[];  // the DTensors, one for each tensor that may have a gradient
};

struct Specs {  // of a DTensor and of a gradient that is placed alike; kept alive
  Reference owner, gradient;
};

struct Watch {
  int64_t handle_at;
  Form* forms;
  const Sharding* sharding;  // null for plain tensors
  Specs* specs;  // the last ones that were compared
  int64_t* extents;
  Handle* kept_alive;  // gradients whose memory a kernel may be reading while other code runs; null for the others
  int64_t with_gradient;
  int64_t* gradients;
  char* present;
  const char* written;
  Object undefined;  // the gradient of a tensor that has none
  bool keeps_alive;
  int64_t version;
};

static Object storage_of(Object t) { return *reinterpret_cast<const Handle>(t + STORAGE_AT); }

static bool is_plain(Object t) {
  uint64_t keys;
  memcpy(&keys, t + KEYS_AT, sizeof keys);
  return storage_of(t) && !(keys & OTHER_KEYS);
}

static void take(Object t, int64_t dim, Snapshot& snapshot) {
  if (dim > 5) return;  // sizes are outside the object
  snapshot.storage = storage_of(t);
  memcpy(snapshot.form, t + FORM_AT, sizeof snapshot.form);
  memcpy(snapshot.memory, snapshot.storage + DATA_AT, sizeof snapshot.memory);
  snapshot.tensor = t;
}

static bool is_same(Object t, const Snapshot& snapshot) {
  return t == snapshot.tensor && storage_of(t) == snapshot.storage &&
         !memcmp(t + FORM_AT, snapshot.form, sizeof snapshot.form) &&
         !memcmp(snapshot.storage + DATA_AT, snapshot.memory, sizeof snapshot.memory);
}

static bool lies_as(Handle t, const Form& form, int32_t dtype) {
  if (ask(dim_of, t) != form.dim || ask(dtype_of, t) != dtype) return false;
  const size_t size = form.dim * sizeof(int64_t);
  return !memcmp(ask(sizes_of, t), form.extents, size) &&
         !memcmp(ask(strides_of, t), form.extents + form.dim, size);
}

static bool is_beside(Handle g, Handle t) {
  return ask(device_type, g) == ask(device_type, t) &&
         ask(device_index, g) == ask(device_index, t);
}

// The address of a gradient, or 0 where kernels cannot read it. A storage can be shorter than a tensor in it, and a gradient
// in exactly its parameter's memory does no harm.
static int64_t readable(Handle g, const Form& form) {
  if (!is_plain(*g) || !is_beside(g, form.object) || !lies_as(g, form, form.grad_dtype)) return 0;
  if (!form.numel) return NO_ELEMENTS;
  const int64_t itemsize = itemsize_of(form.grad_dtype);
  const int64_t end = ask(storage_offset, g) + form.span;
  if (end * itemsize > ask(storage_size, g)) return 0;
  const char *start = ask(data_ptr, g), *param = form.address;
  const bool overlaps = start != param && start < param + form.bytes && param < start + form.span * itemsize;
  return overlaps ? 0 : reinterpret_cast<int64_t>(start);
}

static bool has_other_threads() {
  return PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get()));
}

static void prefetch(const Form* forms, int64_t i, int64_t end) {
  if (i + 16 < end) __builtin_prefetch(forms[i + 16].object);
  if (i + 8 < end) {
    const Object t = *forms[i + 8].object;
    for (int64_t at = STORAGE_AT; at < KEYS_AT + 8; at += 64) __builtin_prefetch(t + at);
    for (size_t at = 0; at < sizeof(Form); at += 64) __builtin_prefetch(reinterpret_cast<Object>(&forms[i + 8]) + at);
  }
  if (i + 4 < end) __builtin_prefetch(storage_of(*forms[i + 4].object) + DATA_AT);
}

// The user's code may move a gradient with `.data =`: an alias keeps its memory.
static void keep(Handle g, const Form& form, bool as_alias, Handle& kept) {
  if (kept) delete_handle(kept);
  kept = nullptr;
  const int64_t *strides = form.extents + form.dim, start = ask(storage_offset, g);
  if (as_alias ? new_alias(g, form.dim, form.extents, strides, start, &kept)
               : new_handle(g, &kept))
    throw Failed();
}

static Handle handle_in(char* python, const Watch* watch) { return reinterpret_cast<Handle>(python + watch->handle_at); }

static char* attribute(char* object, int64_t at) {
  char* found;
  memcpy(&found, object + at, sizeof found);
  return found;
}

static char* python_of(Object t) {
  uint64_t word;
  memcpy(&word, t + PYTHON_AT, sizeof word);
  return reinterpret_cast<char*>(word & ~1);  // the lowest bit may say who owns it
}

static bool have_equal(char* name, char* left, char* right) {
  const Reference of_left{PyObject_GetAttr(left, name)}, of_right{PyObject_GetAttr(right, name)};
  if (of_left.object && of_right.object && PyObject_RichCompareBool(of_left.object, of_right.object, EQUAL) == 1) return true;
  PyErr_Clear();
  return false;
}

static bool are_placed_alike(char* owner, char* gradient, Specs& specs) {
  if (owner == specs.owner.object && gradient == specs.gradient.object) return true;
  static char *mesh = PyUnicode_InternFromString("mesh"), *placements = PyUnicode_InternFromString("placements");
  if (!have_equal(mesh, owner, gradient) || !have_equal(placements, owner, gradient)) return false;
  if (owner != specs.owner.object) {  // else each gradient has a spec of its own
    specs.owner.hold(owner);
    specs.gradient.hold(gradient);
  }
  return true;
}

// The local part of the gradient of an owner; null where it is placed otherwise, or is no plain tensor.
static Handle local_part(char* gradient, const Watch* watch, int64_t i) {
  const Sharding& in = *watch->sharding;
  if (attribute(gradient, in.class_at) != in.kind) return nullptr;
  char *spec = attribute(gradient, in.spec_at), *spec_of_owner = attribute(in.owners[i], in.spec_at);
  if (!are_placed_alike(spec_of_owner, spec, watch->specs[i])) return nullptr;
  char* part = attribute(gradient, in.local_at);  // last, since a comparison may run other code
  return attribute(part, in.class_at) == in.kind_of_part ? handle_in(part, watch) : nullptr;
}

// Take the gradients of the owners from `first` on, or None where torch has no Python object for one. Each loop asks for the
// memory that the next one reads.
static void take_gradients(const Watch* watch, int64_t first, Reference (&gradients)[BLOCK]) {
  const Sharding& in = *watch->sharding;
  const int64_t count = watch->with_gradient - first < BLOCK ? watch->with_gradient - first : BLOCK;
  char* const* owners = in.owners + first;
  Handle found[BLOCK];
  bool is_sharded[BLOCK];
  for (int64_t i = 0; i < count; i++) __builtin_prefetch(owners[i]);
  for (int64_t i = 0; i < count; i++) __builtin_prefetch(*handle_in(owners[i], watch));
  for (int64_t i = 0; i < count; i++) __builtin_prefetch(*(found[i] = grad_of(*handle_in(owners[i], watch))));
  for (int64_t i = 0; i < count; i++) {
    char* gradient = *found[i] == watch->undefined ? nullptr : python_of(*found[i]);
    if (!gradient && *found[i] != watch->undefined) gradient = &_Py_NoneStruct;
    gradients[i].hold(gradient);
    is_sharded[i] = gradient && attribute(gradient, in.class_at) == in.kind;
  }
  for (int64_t i = 0; i < count; i++)
    if (is_sharded[i]) {
      __builtin_prefetch(attribute(gradients[i].object, in.spec_at));
      __builtin_prefetch(attribute(gradients[i].object, in.local_at));
    }
  for (int64_t i = 0; i < count; i++)
    if (is_sharded[i]) __builtin_prefetch(*handle_in(attribute(gradients[i].object, in.local_at), watch));
}

static Watch* in(char* capsule) { return static_cast<Watch*>(PyCapsule_GetPointer(capsule, nullptr)); }

static void let_go(Watch* watch) {
  for (int64_t i = 0; watch->keeps_alive && i < watch->with_gradient; i++) {
    if (watch->kept_alive[i]) delete_handle(watch->kept_alive[i]);
    watch->kept_alive[i] = nullptr;
  }
  watch->keeps_alive = false;
}

static void destroy(Watch* watch) {
  let_go(watch);
  delete[] watch->specs;
  delete[] watch->forms;
  delete[] watch->extents;
  delete[] watch->kept_alive;
  delete watch;
}

static char* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// `handle_at` is the offset of the pointer to torch's object in a tensor's Python object. Null means no `sharding`.
extern "C" char* make_watch(int64_t handle_at, int64_t count, const Handle* tensors, int64_t with_gradient,
                            const Handle* examples, int64_t* gradients, char* present, const Sharding* sharding) {
  auto* watch = new Watch{handle_at, new Form[count], sharding, new Specs[with_gradient](), nullptr,
                          new Handle[with_gradient](), with_gradient, gradients, present, present, nullptr, false, 0};
  try {
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++) size += 2 * ask(dim_of, tensors[i]);
    int64_t* extents = watch->extents = new int64_t[size];
    for (int64_t i = 0; i < count; i++) {
      Handle t = tensors[i];
      if (!is_plain(*t)) throw Failed();
      const int64_t dim = ask(dim_of, t), numel = ask(numel_of, t);
      const int64_t *sizes = ask(sizes_of, t), *strides = ask(strides_of, t);
      memcpy(extents, sizes, dim * sizeof(int64_t));
      memcpy(extents + dim, strides, dim * sizeof(int64_t));
      const int32_t dtype = ask(dtype_of, t), grad_dtype = i < with_gradient ? ask(dtype_of, examples[i]) : dtype;
      int64_t span = 1;
      for (int64_t d = 0; d < dim; d++) span += (sizes[d] - 1) * strides[d];
      const int64_t bytes = numel ? span * itemsize_of(dtype) : 0;
      watch->forms[i] = {t, ask(data_ptr, t), extents, dim, numel, span, bytes, dtype, grad_dtype, {}, {}, 0};
      take(*t, dim, watch->forms[i].itself);
      extents += 2 * dim;
    }
    if (with_gradient) watch->undefined = *grad_of(*examples[0]);
    return PyCapsule_New(watch, nullptr, [](char* capsule) { destroy(in(capsule)); });
  } catch (...) {
    destroy(watch);
    return none();
  }
}

extern "C" int64_t look(char* capsule, char* grads, int64_t first, int64_t end, int64_t keep_alive) {
  Watch* watch = in(capsule);
  const bool read_grad = grads == &_Py_NoneStruct;
  Form* forms = watch->forms;
  watch->keeps_alive |= keep_alive || has_other_threads();
  Reference of_owners[BLOCK];
  int64_t seen = 0;
  bool renewed = false;
  for (int64_t i = first; i < end; i++) try {
    prefetch(forms, i, end);
    Form& form = forms[i];
    Handle t = form.object;
    if (!is_same(*t, form.itself)) {
      if (is_plain(*t) && ask(data_ptr, t) == form.address && lies_as(t, form, form.dtype))
        take(*t, form.dim, form.itself);
      else
        seen |= SEEN_MOVED;
    }
    if (i >= watch->with_gradient) continue;
    char* owner = watch->sharding ? watch->sharding->owners[i] : nullptr;
    if (owner && handle_in(attribute(owner, watch->sharding->local_at), watch) != t) seen |= SEEN_MOVED;
    Handle g;
    bool exists;
    if (!read_grad) {
      char* item = PyList_GetItem(grads, i);
      g = handle_in(item, watch);
      exists = item != &_Py_NoneStruct;
    } else if (owner) {
      const int64_t index = (i - first) % BLOCK;
      if (!index) take_gradients(watch, i, of_owners);
      exists = of_owners[index].object;
      g = exists ? local_part(of_owners[index].object, watch, i) : nullptr;
    } else {
      g = grad_of(*t);
      exists = *g != watch->undefined;
    }
    watch->present[i] = exists;
    int64_t found = 0;
    if (exists) {
      if (g && is_same(*g, form.gradient)) {
        found = form.found;
      } else if (g && (found = readable(g, form))) {
        take(*g, form.dim, form.gradient);
        form.found = found;
      } else {
        seen |= SEEN_UNLIKE;
      }
      if (found && watch->keeps_alive) keep(g, form, keep_alive, watch->kept_alive[i]);
    }
    renewed |= found != watch->gradients[i];
    watch->gradients[i] = found;
  } catch (...) {
    seen |= SEEN_MOVED;
  }
  watch->version += renewed;
  return watch->version << FLAG_BITS | seen;
}

extern "C" void finish(char* capsule) {
  Watch* watch = in(capsule);
  for (int64_t i = 0; i < watch->with_gradient; i++) try {
    if (!watch->written[i]) continue;
    bump_version(watch->forms[i].object);
    if (watch->sharding) bump_version(handle_in(watch->sharding->owners[i], watch));
  } catch (...) {  // a tensor of inference mode has no version
  }
  let_go(watch);
}

extern "C" void set_written(char* capsule, const char* written) { in(capsule)->written = written; }
