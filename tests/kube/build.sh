#!/bin/bash
# kube-apiserver 1.20, etcd and kubectl for `tox -e kube`, from Debian 12's packages: build.sh FOLDER. Nothing to do where
# they are.
# Needs a Debian-based machine with dpkg-dev, 4 GB of scratch space below FOLDER, and five minutes or more.
# Nothing is installed: packages are downloaded with lists of their own, unpacked below FOLDER, and removed at the end.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
[[ -x $out/kube-apiserver && -x $out/etcd && -x $out/kubectl ]] && exit 0
work=$out/build
log=$out/build.log
trap 'status=$?; rm -rf "$work"; [[ $status -eq 0 ]] || tail -n 20 "$log" >&2' EXIT
rm -rf "$work"
mkdir -p "$work"/{lists/partial,cache/archives/partial,tmp,home} "$work/gopath/src/k8s.io"
exec 3>&1 >"$log" 2>&1
say() { echo "$*" >&3; }

# The machine's mirror and keys, for bookworm and its sources.
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | head -n1 || true)
mirror=${mirror:-http://deb.debian.org/debian}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for kind in deb deb-src; do echo "$kind [signed-by=$keys] $mirror bookworm main"; done >"$work/sources.list"
: >"$work/status"
apt=(apt-get -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$work/lists"
  -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3)
cd "$work"
say "downloading"
"${apt[@]}" update
"${apt[@]}" download kubernetes-client
dpkg -x ./kubernetes-client_*.deb client
cp client/usr/bin/kubectl "$out/"
[[ -x $out/kube-apiserver && -x $out/etcd ]] && exit 0
"${apt[@]}" source --download-only --only-source kubernetes
"${apt[@]}" download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server
say "unpacking"
for deb in ./*.deb; do dpkg -x "$deb" root; done
source=$work/gopath/src/k8s.io/kubernetes
dpkg-source -x ./kubernetes_*.dsc "$source"
cd "$source"
# Go 1.19 is newer than what this source was written for. Its vendored reflect2 calls into the runtime in a way that has
# changed since; and reflect.Zero of a string now equals any empty string, so that those would be refused as null.
rm -rf vendor/github.com/modern-go/reflect2
cp -rL "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
sed -i 's/ || reflect\.DeepEqual(reflect\.Zero(reflect\.TypeOf(data)), reflect\.ValueOf(data))//' \
  vendor/k8s.io/kube-openapi/pkg/validation/validate/type.go vendor/github.com/go-openapi/validate/type.go
export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache GOTMPDIR=$work/tmp HOME=$work/home
export GOENV=off GO111MODULE=off GOPROXY=off CGO_ENABLED=0 PATH=$work/root/usr/lib/go-1.19/bin:$PATH
jobs=${JOBS:-1}
say "building"
go build -p "$jobs" -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=true' staging/src/k8s.io pkg/apis | xargs -n1 dirname | sort -u |
  grep -vE 'code-generator|sample-|examples' | sed 's,^staging/src/,,; s,^pkg/,k8s.io/kubernetes/pkg/,' | paste -sd,)
"$work/openapi-gen" -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations"
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
go build -p "$jobs" -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
  -o "$work/kube-apiserver" ./cmd/kube-apiserver
cp "$work/root/usr/bin/etcd" "$work/kube-apiserver" "$out/"
say "in $out: $("$out/kube-apiserver" --version), $("$out/etcd" --version | head -n1)"
